"""What reading KV takes: seconds a token of it, learnt from steps that differ in little else.

Two steps with the same number of rows, soon after one another, differ by the KV that their rows read, and by chance: in
seconds by so many a token. Of many such slopes the median is what a token takes, whatever hiccups make of a few (Theil
1950, Sen 1968). What counts is a lower bound of it: were the median lower, so many slopes would lie above the bound in
less than one case of twenty. So where it is chance that makes the difference, a token takes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

SLOPES = 63  # that one median is of
_BOUND = 25  # of these, from the lowest: of 63 throws of a coin at most 24 are heads in 0.04 of all cases
TELLING = 512  # tokens by which two steps differ, at least: with fewer their slope is chance
SOON = 64  # steps after which one is compared with no more


class _Step(NamedTuple):
    number: int
    kv: int
    seconds: float


class KvTime:
    """Of one model. `token_s`: seconds; 0.0 until enough is known."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._steps = 0
        self._last: dict[int, _Step] = {}  # by number of rows
        self._slopes: list[float] = []

    def note(self, rows: int, kv: int, seconds: float) -> bool:
        """A step of so many rows, each of one token, that read so many tokens of KV. → whether `token_s` is new."""
        self._steps += 1
        last = self._last.get(rows)
        if last is None or self._steps - last.number > SOON:
            self._last[rows] = _Step(self._steps, kv, seconds)
            return False
        if abs(kv - last.kv) < TELLING:
            return False
        self._slopes.append((seconds - last.seconds) / (kv - last.kv))
        del self._last[rows]  # or two slopes would have one chance in common
        if len(self._slopes) < SLOPES:
            return False
        self.token_s = max(sorted(self._slopes)[_BOUND - 1], 0.0)
        self._slopes.clear()
        return True
