"""The texts of one tenant's sessions on one model, and where their runs of tokens last occurred.

    texts   number → the tokens of a session, as long as it is open
    slots   hash of a run → number of a text « 32 | position behind the run; 0: none

The texts are the sessions' own lists: nothing is copied, and a session that leaves takes its text along. As in a
SuffixIndex, a later run takes the slot of an earlier one with the same hash, and places are compared with the tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import count

import numpy as np

from djinnd.core.runs import RUN
from djinnd.core.tuning import GUESSES

_POSITION = 32  # bits of a slot
_POSITIONS = (1 << _POSITION) - 1
NOTHING: Sequence[int] = ()


class SharedTexts:
    """Finds the latest tokens of one session in the texts of a tenant's others."""

    def __init__(self) -> None:
        self._texts: dict[int, Sequence[int]] = {}
        self._next = count(1)
        self._added = 0  # runs
        self._resize(array("q", bytes(8 * GUESSES.least_slots)))

    def _resize(self, slots: array[int]) -> None:
        self._slots, self._mask = slots, len(slots) - 1
        # With more runs than this, the table grows.
        self._full = len(slots) // 2 if len(slots) < GUESSES.most_shared_slots else math.inf

    def numbers(self) -> set[int]:
        return set(self._texts)

    def join(self, text: Sequence[int]) -> int:
        """Adds a text, which may grow and be cut later. Returns its number."""
        number = next(self._next)
        self._texts[number] = text
        return number

    def leave(self, number: int) -> None:
        """Removes a text."""
        del self._texts[number]

    def text(self, number: int) -> Sequence[int]:
        """The text with this number; empty if it has left."""
        return self._texts.get(number, NOTHING)

    def add(self, number: int, first: int, hashes: Sequence[int] | np.ndarray) -> None:
        """Adds the runs with these hashes, which end before the text's positions from `first` on."""
        self._added += len(hashes)
        while self._added > self._full:
            # A slot's number gets one more bit. Each place is in both halves, and is found in one of them.
            self._resize(self._slots * 2)
        place = number << _POSITION | first
        if isinstance(hashes, np.ndarray):
            slots = np.frombuffer(self._slots, dtype=np.int64)
            slots[hashes & self._mask] = np.arange(place, place + len(hashes))
        else:
            for at, hashed in enumerate(hashes, place):
                self._slots[hashed & self._mask] = at

    def last(self, tokens: Sequence[int], hashed: int, besides: int) -> tuple[int, int] | None:
        """The last known occurrence of the tokens' last run, which has this hash, in another text than `besides`: the
        text's number, and the position behind the run. At least one token follows there."""
        place = self._slots[hashed & self._mask]
        number, at = place >> _POSITION, place & _POSITIONS
        if not place or number == besides:
            return None
        text = self.text(number)
        return (number, at) if at < len(text) and text[at - RUN : at] == tokens[len(tokens) - RUN :] else None
