"""Plans how many streamed blocks leave their MLP to the host. Pure code: measured rates in, a number out.

A step takes the longer of two times. The bus brings what the host does not compute; and the device computes its blocks
and waits for the host, one block after another. Each MLP that moves to the host makes the first time shorter and the
second one longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from djinnd.model.tuning import BESIDE_GAIN


@dataclass(frozen=True, slots=True)
class BesideRates:
    bus: float  # bytes/s of the bus alone
    bus_beside: float  # bytes/s of the bus while the host computes
    mlp_s: Mapping[int, float]  # rows → seconds that the host takes for one MLP, while the bus is busy


@dataclass(frozen=True, slots=True)
class Streamed:
    """The work of a step of few rows, by the bus alone."""

    nbytes: int  # of all streamed blocks
    mlp_nbytes: int  # of one MLP, as it would cross the bus
    device_s: float  # that the device computes in a step

    def step_s(self, rates: BesideRates, mlps: int, rows: int) -> float:
        """Seconds of a step of `rows` rows with so many MLPs on the host."""
        bus = rates.bus_beside if mlps else rates.bus
        return max((self.nbytes - mlps * self.mlp_nbytes) / bus, self.device_s + mlps * rates.mlp_s[rows])


def best_share(streamed: Streamed, rates: BesideRates, most: int) -> int:
    """How many MLPs, up to `most`, the host computes in the fastest step of one row; 0 if that gains little."""
    best = min(range(most + 1), key=lambda mlps: streamed.step_s(rates, mlps, 1))
    return best if _gains(streamed, rates, best, 1) else 0


def most_rows(streamed: Streamed, rates: BesideRates, mlps: int) -> int:
    """The most rows with which a step is faster than by the bus alone; 0 if one row is not."""
    most = 0
    for rows in sorted(rates.mlp_s):
        if not _gains(streamed, rates, mlps, rows):
            break
        most = rows
    return most


def _gains(streamed: Streamed, rates: BesideRates, mlps: int, rows: int) -> bool:
    return streamed.step_s(rates, mlps, rows) <= BESIDE_GAIN * streamed.step_s(rates, 0, rows)
