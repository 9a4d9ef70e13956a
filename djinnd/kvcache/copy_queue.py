"""Pages that wait for their copy over the bus, one way.

Those come first that a call waits for, or will in a moment, but for what LEFT_OVER says. The others are held to a rate,
by a token bucket, beside steps that decode: what crosses the bus takes memory from these, and as many bytes in four
times the time cost each of them a quarter of that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from djinnd.kvcache.moves import Move

SAVED_S = 0.02  # so long, at most, bytes are saved up for which nobody was there
LEFT_OVER = 8  # one byte of others for so many urgent ones, so that they come to an end whatever is urgent,
PIECE_BYTES = 64 << 20  # and not before they are so many


class CopyQueue:
    def __init__(self) -> None:
        self._urgent: deque[Move] = deque()
        self._others: deque[Move] = deque()
        self._allowed = math.inf  # bytes, of others
        self._owed = 0.0  # of these, what they are to have before urgent ones
        self._are_held = False  # others, since they have had what they were allowed
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, move: Move) -> None:
        move.is_queued = True
        (self._urgent if move.is_urgent else self._others).append(move)

    def drop(self) -> None:
        """Those that have been, see Moves.drop."""
        self._urgent = deque(move for move in self._urgent if not move.is_dropped)
        self._others = deque(move for move in self._others if not move.is_dropped)

    def hurry(self) -> None:
        """Somebody's call waits for moves now for which none did when they came."""
        hurried = [move for move in self._others if move.is_urgent]
        if hurried:
            self._urgent.extend(hurried)
            self._others = deque(move for move in self._others if not move.is_urgent)
            self._are_held = self._are_held and bool(self._others)

    def pace(self, rate: float, now: float) -> None:
        """Bytes a second that others may set out with, from now on; inf: any number."""
        since, self._at = now - self._at, now
        saved = max(since, SAVED_S) if self._are_held else SAVED_S  # steps may take longer than that
        self._allowed = math.inf if rate == math.inf else min(self._allowed + rate * since, rate * saved)

    def holds(self, queued: deque[Move]) -> bool:
        """Whether these, what `next` has answered, are held to a rate now."""
        return queued is self._others and self._allowed < math.inf

    @property
    def next(self) -> deque[Move]:
        """The first of these may begin, and with it those that follow, if there is one; to be taken from it."""
        if self._others and self._allowed > 0 and (not self._urgent or self._owed >= PIECE_BYTES):
            return self._others
        return self._urgent

    def began(self, queued: deque[Move], begun: Sequence[Move], nbytes: int) -> None:
        """The copies of these, of so many bytes together, which were taken from `queued`, what `next` had answered."""
        for move in begun:
            move.is_queued = False
        if queued is self._others:
            self._allowed -= nbytes
            self._owed = max(self._owed - nbytes, 0.0)
            self._are_held = bool(queued) and self._allowed <= 0
        elif self._others:
            self._owed += nbytes / LEFT_OVER
