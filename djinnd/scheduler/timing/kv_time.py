"""Learns the seconds that reading one token of KV takes.

Two steps with the same number of rows, soon after one another, differ in time by the KV that their rows read, and by
chance. Each such pair gives a slope in seconds a token. The median of many slopes is robust against outliers (Theil
1950, Sen 1968).

The result is a lower bound of that median: if the true median were lower, this many slopes would lie above the bound in
less than one case of twenty. So if only chance makes the difference, the result is 0.
"""

from __future__ import annotations

from typing import NamedTuple

SLOPES = 63  # slopes of one median
# rank, from the lowest, of the slope that is the bound: of 63 throws of a coin, at most 24 are heads in 0.04 of all
# cases
_BOUND = 25
TELLING = 512  # Tokens of KV by which two steps have to differ; with fewer, their slope is chance.
SOON = 64  # A step is compared with one at most so many steps earlier.


class _Step(NamedTuple):
    number: int
    kv: int
    seconds: float


class KvTime:
    """The KV time of one model. `token_s` is in seconds a token; 0.0 until enough slopes are known."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._steps = 0
        self._last: dict[int, _Step] = {}  # by number of rows
        self._slopes: list[float] = []

    def note(self, rows: int, kv: int, seconds: float) -> bool:
        """Notes a step of `rows` rows, each of one token, that read `kv` tokens of KV. Returns True if `token_s` is
        new."""
        self._steps += 1
        last = self._last.get(rows)
        if last is None or self._steps - last.number > SOON:
            self._last[rows] = _Step(self._steps, kv, seconds)
            return False
        if abs(kv - last.kv) < TELLING:
            return False
        self._slopes.append((seconds - last.seconds) / (kv - last.kv))
        del self._last[rows]  # each step is used once, so that slopes are independent
        if len(self._slopes) < SLOPES:
            return False
        self.token_s = max(sorted(self._slopes)[_BOUND - 1], 0.0)
        self._slopes.clear()
        return True
