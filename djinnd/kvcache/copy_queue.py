"""Pages that wait for their copy over the bus, one way.

Those come first that a call waits for, or will in a moment. The others are held to a rate, by a token bucket, beside
steps that decode: what crosses the bus takes memory from these, and as many bytes in four times the time cost each of
them a quarter of that.
"""

from __future__ import annotations

import math
from collections import deque

from djinnd.kvcache.moves import Move

SAVED_S = 0.02  # so long, at most, the bytes are saved up that did not set out: some steps


class CopyQueue:
    def __init__(self) -> None:
        self._urgent: deque[Move] = deque()
        self._others: deque[Move] = deque()
        self._allowed = math.inf  # bytes, of others
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, move: Move) -> None:
        (self._urgent if move.is_urgent else self._others).append(move)

    def hurry(self) -> None:
        """Somebody's call waits for moves now for which none did when they came."""
        hurried = [move for move in self._others if move.is_urgent]
        if hurried:
            self._urgent.extend(hurried)
            self._others = deque(move for move in self._others if not move.is_urgent)

    def pace(self, rate: float, now: float) -> None:
        """Bytes a second that others may set out with, from now on; inf: any number."""
        since, self._at = now - self._at, now
        self._allowed = math.inf if rate == math.inf else min(self._allowed + rate * since, rate * SAVED_S)

    @property
    def next(self) -> deque[Move]:
        """The first of these may begin, and with it those that follow, if there is one; to be taken from it."""
        if self._urgent or self._allowed <= 0:
            return self._urgent
        return self._others

    def began(self, moves: deque[Move], nbytes: int) -> None:
        """So many bytes of moves that were taken from what `next` had answered."""
        if moves is self._others:
            self._allowed -= nbytes
