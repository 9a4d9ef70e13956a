"""An index of the places where a session's runs of tokens last occurred.

It is a hash table of a fixed size: a later run takes the slot of an earlier one with the same hash. So its memory is
bounded, it forgets the oldest runs of very long sessions, and each place that it gives is compared with the tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from djinnd.core.runs import RUN, hash_of, hashes_of
from djinnd.core.tuning import GUESSES


class SuffixIndex:
    """Knows the runs that end at positions up to `end`. A slot has the position behind a run; 0: none."""

    def __init__(self) -> None:
        self._resize(GUESSES.least_slots)

    def _resize(self, slots: int) -> None:
        self.end = RUN - 1
        self._slots = array("i", bytes(4 * slots))
        self._numbers = np.frombuffer(self._slots, dtype=np.int32)  # the same memory: faster for many runs at once
        self._mask = slots - 1
        self._full = slots // 2 if slots < GUESSES.most_slots else math.inf  # tokens from which on the table grows

    def _grow(self, end: int) -> None:
        self._resize(min(1 << (2 * end - 1).bit_length(), GUESSES.most_slots))

    def cut(self, length: int) -> None:
        """Notes that the session has kept only its first `length` tokens. The latest of their runs are added again,
        as runs that were cut may have taken their slots."""
        self.end = max(min(self.end, length - GUESSES.indexed_at_once), RUN - 1)

    def follow(self, tokens: Sequence[int], end: int) -> tuple[int, Sequence[int] | np.ndarray]:
        """Adds the runs that end at positions up to `end`, at most `GUESSES.indexed_at_once` of them. Returns the first
        of these positions, and the hashes of the runs."""
        if end > self._full:
            self._grow(end)
        first, end = self.end + 1, min(end, self.end + GUESSES.indexed_at_once)
        if end - first >= RUN:
            many = hashes_of(tokens, first, end)
            self._numbers[many & self._mask] = np.arange(first, end + 1)  # of equal slots, the last one stays
            self.end = end
            return first, many
        few = [hash_of(tokens, at) for at in range(first, end + 1)]
        for hashed in few:
            self.add(hashed)
        return first, few

    def add(self, hashed: int) -> None:
        """Adds the next run, which has this hash. If the table has to grow, it forgets all runs."""
        self.end += 1
        self._slots[hashed & self._mask] = self.end
        if self.end > self._full:
            self._grow(self.end)

    def last(self, tokens: Sequence[int], hashed: int) -> int:
        """The position behind the last known occurrence of the tokens' last run, which has this hash; 0: there is
        none."""
        at, length = self._slots[hashed & self._mask], len(tokens)
        return at if at < length and tokens[at - RUN : at] == tokens[length - RUN :] else 0
