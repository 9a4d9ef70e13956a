"""The tuned constants of the scheduler. Each is measured (how, where) or chosen; none is calibrated at load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTuning:
    """How much goes into one step."""

    # A step without a row of a higher class may read this many prompt tokens, even if it then misses a target. So every
    # prompt is read some day. Measured: seven decode rows of a 13B model on an H200 take 0.2 ms longer together with 9
    # prompt tokens, and 1.2 ms longer with 57.
    least_chunk: int = 64
    headroom: float = 0.85  # Chosen: share of a target that a predicted step may fill, because predictions are rough.
    # Chosen. If the decode rows of a step miss their target without any prompt, the step may take this many times as
    # long as these rows alone.
    overrun: float = 1.25
    # Chosen. While first tokens are late, the steps of their class may take up to this many times the target between
    # tokens.
    latest: float = 2.0
    recent_s: float = 10.0  # Chosen: seconds after a class's last call in which the next one may come at any time.
    brief: int = 128  # Chosen: prompt tokens; sessions with more are scheduled after the others of their class.
    short_steps: int = 64  # Chosen: steps for which pages count as short after they were short.
    row_s: float = 1e-3  # Chosen: device seconds of a row, until steps have been measured.


@dataclass(frozen=True, slots=True)
class TimesTuning:
    """How step times are learned."""

    kept: int = 5  # Chosen: measurements of a size; their median is used, which ignores outliers.
    # Chosen. A size that has not run for this many measurements is forgotten, because it may be faster now.
    forgotten: int = 1024
    first: int = 16  # Chosen: rows or tokens that are tried if nothing has been measured.
    sure: int = 3  # Chosen: after this many steps with the same number of rows and no prompt, their time is known.
    patience: int = 32  # Chosen: most steps that are kept free of prompts to measure one number of rows.


@dataclass(frozen=True, slots=True)
class FairnessTuning:
    """How tenants and sessions take turns."""

    lag_s: float = 1.0  # Chosen: a tenant that returns gets at most this much device time to catch up with others.
    # Chosen. While pages are short, a tenant's sessions keep their pages until it is this much device time ahead.
    seat_s: float = 0.25
    aged_rows: int = 16  # Chosen: rows that an aged session gets before others, so that copying its pages back pays.


@dataclass(frozen=True, slots=True)
class EvictionTuning:
    """When idle sessions leave the device."""

    quiet_s: float = 10.0  # Chosen: an idle session leaves after this many seconds without a request or a signal.
    crowded_quiet_s: float = 1.0  # Chosen: the same while free pages are scarce.
    scarce: float = 0.1  # Chosen: free pages are scarce if they are a smaller share of the pool than this.
    unknown_s: float = 60.0  # Chosen: a session without an expected time is assumed to return in this many seconds.
    written_at_once: int = 16  # Chosen: pages that each call of `tend` writes to disk.


STEP = StepTuning()
TIMES = TimesTuning()
FAIRNESS = FairnessTuning()
EVICTION = EvictionTuning()
