"""An index of the places where a session's runs of tokens last occurred.

It is a hash table of a fixed size: a later run takes the slot of an earlier one with the same hash. So its memory is
bounded, it forgets the oldest runs of very long sessions, and each place that it gives is compared with the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from djinnd.core.tuning import GUESSES

_FACTORS = (0x9E3779B97F, 0xC2B2AE3D27, 0x165667B19F)  # odd, 40 bits: with tokens of 20 bits, sums stay below 2^63
_SHIFT = 20  # the bits of a sum from here on depend on all bits of its tokens
RUN = len(_FACTORS)  # tokens of a run


class SuffixIndex:
    """Knows the runs that end at positions up to `_indexed`. A slot has the position behind a run; 0: none."""

    def __init__(self) -> None:
        self._indexed = RUN - 1
        self._resize(GUESSES.least_slots)

    def _resize(self, slots: int) -> None:
        self._slots = array("i", bytes(4 * slots))
        self._numbers = np.frombuffer(self._slots, dtype=np.int32)  # the same memory: faster for many runs at once
        self._mask = slots - 1

    def cut(self, length: int) -> None:
        """Notes that the session has kept only its first `length` tokens."""
        self._indexed = max(min(self._indexed, length), RUN - 1)

    def follow(self, tokens: Sequence[int], end: int) -> None:
        """Adds the runs that end at positions up to `end`, at most `GUESSES.indexed_at_once` of them."""
        if end > len(self._slots) // 2 and len(self._slots) < GUESSES.most_slots:
            self._resize(min(1 << (2 * end - 1).bit_length(), GUESSES.most_slots))
            self._indexed = RUN - 1
        first, end = self._indexed + 1, min(end, self._indexed + GUESSES.indexed_at_once)
        if end - first < RUN:
            for at in range(first, end + 1):
                self._slots[self._slot(tokens, at)] = at
        else:
            ids = np.array(tokens[first - RUN : end], np.int64)
            sums = sum(ids[place : len(ids) - RUN + 1 + place] * factor for place, factor in enumerate(_FACTORS))
            self._numbers[sums >> _SHIFT & self._mask] = np.arange(first, end + 1)  # of equal slots, the last one stays
        self._indexed = max(self._indexed, end)

    def last(self, tokens: Sequence[int]) -> int:
        """The position behind the last known occurrence of the tokens' last run; 0: there is none."""
        length = len(tokens)
        if length < RUN:
            return 0
        at = self._slots[self._slot(tokens, length)]
        return at if at < length and tokens[at - RUN : at] == tokens[length - RUN :] else 0

    def _slot(self, tokens: Sequence[int], end: int) -> int:
        a, b, c = tokens[end - RUN : end]
        return (a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) >> _SHIFT & self._mask
