"""Pages that wait to be copied over the bus, in one direction.

Urgent pages come first: a request waits for them now or will soon. Beside steps that decode, a token bucket limits the
rate of the others, because bus traffic takes memory bandwidth from these steps. The same bytes spread over four times
as many steps cost each of them a quarter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from djinnd.kvcache.moves import Move
from djinnd.kvcache.tuning import LEFT_OVER, OWED_BYTES, SAVED_S


class CopyQueue:
    """The queue of one direction. `add` fills it; the copying side takes moves from `next` and reports them with
    `began`."""

    def __init__(self) -> None:
        self._urgent: deque[Move] = deque()
        self._others: deque[Move] = deque()
        self._allowed = math.inf  # bytes of other pages that the bucket allows now
        self._owed = 0.0  # bytes of other pages that go before urgent ones
        self._are_held = False  # other pages wait because the bucket was empty
        self._at = 0.0  # time of the last `pace`

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, move: Move) -> None:
        move.is_queued = True
        (self._urgent if move.is_urgent else self._others).append(move)

    def drop(self) -> None:
        """Removes the moves that are dropped (Moves.drop)."""
        self._urgent = deque(move for move in self._urgent if not move.is_dropped)
        self._others = deque(move for move in self._others if not move.is_dropped)

    def hurry(self) -> None:
        """Moves the pages that have become urgent since they came into the urgent queue."""
        hurried = [move for move in self._others if move.is_urgent]
        if hurried:
            self._urgent.extend(hurried)
            self._others = deque(move for move in self._others if not move.is_urgent)
            self._are_held = self._are_held and bool(self._others)

    def pace(self, rate: float, now: float) -> None:
        """Sets the rate of other pages in bytes a second, from now on; inf means no limit."""
        since, self._at = now - self._at, now
        # steps may take longer than SAVED_S, and so may the time between two calls
        saved = max(since, SAVED_S) if self._are_held else SAVED_S
        self._allowed = math.inf if rate == math.inf else min(self._allowed + rate * since, rate * saved)

    def holds(self, queued: deque[Move]) -> bool:
        """True if `queued`, an answer of `next`, is held to a rate now."""
        return queued is self._others and self._allowed < math.inf

    @property
    def next(self) -> deque[Move]:
        """The queue from which to take the next copies. Its first move, if there is one, may begin, and the moves
        behind it with it."""
        if self._others and self._allowed > 0 and (not self._urgent or self._owed >= OWED_BYTES):
            return self._others
        return self._urgent

    def began(self, queued: deque[Move], begun: Sequence[Move], nbytes: int) -> None:
        """Notes that copies of these moves, of `nbytes` together, have begun. They were taken from `queued`, an answer
        of `next`."""
        for move in begun:
            move.is_queued = False
        if queued is self._others:
            self._allowed -= nbytes
            self._owed = max(self._owed - nbytes, 0.0)
            self._are_held = bool(queued) and self._allowed <= 0
        elif self._others:
            self._owed += nbytes / LEFT_OVER
