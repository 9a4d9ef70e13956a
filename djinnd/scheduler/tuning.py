"""The tuned constants of the scheduler. Each is measured (how, where) or chosen; none is calibrated at load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTuning:
    """How much goes into one step."""

    # Measured: beside seven rows of a 13B model, an H200 takes 0.2 ms more for 9 prompt tokens and 1.2 ms more for 57.
    least_chunk: int = 64  # prompt tokens that a step reads at least, if no higher class has a row
    headroom: float = 0.85  # Chosen: share of a target that a predicted step may fill, because predictions are rough.
    overrun: float = 1.25  # Chosen: times the time of rows that miss their target by themselves, for a step
    latest: float = 2.0  # Chosen: factor by which late first tokens may stretch the time between tokens.
    recent_s: float = 10.0  # Chosen: seconds after a class's last call in which the next one may come at any time.
    brief: int = 128  # Chosen: prompt tokens; sessions with more are scheduled after the others of their class.
    short_steps: int = 64  # Chosen: steps for which pages count as short after they were short.
    row_s: float = 1e-3  # Chosen: device seconds of a row, until steps have been measured.


@dataclass(frozen=True, slots=True)
class TimesTuning:
    """How step times are learned."""

    kept: int = 5  # Chosen: measurements of a size; their median is used, which ignores outliers.
    forgotten: int = (
        1024  # Chosen: measurements after which a size that has not run is forgotten; it may be faster now.
    )
    first: int = 16  # Chosen: size that is tried if nothing is known.
    sure: int = 3  # Chosen: measurements of a number of rows alone after which its time counts as known.
    patience: int = 32  # Chosen: steps, at most, that are kept to a number of rows to measure it.


@dataclass(frozen=True, slots=True)
class FairnessTuning:
    """How tenants and sessions take turns."""

    lag_s: float = 1.0  # Chosen: device time that a tenant can be ahead before the others' claim to catch up lapses.
    seat_s: float = 0.25  # Chosen: device time by which a tenant may be ahead and keep its seats, if pages are short.
    aged_rows: int = 16  # Chosen: rows that ageing gives a session, so that bringing its pages back pays.


@dataclass(frozen=True, slots=True)
class EvictionTuning:
    """When idle sessions leave the device."""

    quiet_s: float = 10.0  # Chosen: seconds without a word from its client, after which an idle session leaves.
    crowded_quiet_s: float = 1.0  # Chosen: the same while free pages are scarce.
    scarce: float = 0.1  # Chosen: free pages are scarce if they are a smaller share of the pool than this.
    unknown_s: float = 60.0  # Chosen: a session without an expected time is back in so many seconds at the earliest.
    written_at_once: int = 16  # Chosen: pages that each call of `tend` writes to disk.


STEP = StepTuning()
TIMES = TimesTuning()
FAIRNESS = FairnessTuning()
EVICTION = EvictionTuning()
