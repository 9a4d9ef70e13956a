"""Guesses a session's next tokens: its latest tokens have occurred before, and the same may follow again.

Each forecast is compared with the tokens that then come, whether a step has run it or not. So the guesser always knows
how often its forecasts come true, and a session of text without repetition pays for no guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from djinnd.core.suffix_index import SuffixIndex
from djinnd.core.tuning import GUESSES


class Guesser:
    """The guesses of one session."""

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._forecast: list[int] = []  # the tokens expected from position `_at` on
        self._at = 0
        self._right, self._judged = GUESSES.first_right, GUESSES.first_judged  # recent tokens of forecasts, decayed

    def cut(self, length: int) -> None:
        """Notes that the session has kept only its first `length` tokens."""
        self._index.cut(length)
        if length < self._at:
            self._forecast = []

    def guess(self, tokens: Sequence[int], most: int, worth: float) -> tuple[int, ...]:
        """Expects at most `most` next tokens, each with a chance of at least `worth` to be right."""
        self._judge(tokens)
        self._index.follow(tokens, len(tokens) - 1)
        found = self._index.last(tokens)
        self._forecast, self._at = _followers(tokens, found, GUESSES.longest) if found else [], len(tokens)
        return tuple(self._forecast[: min(most, self._length(worth))]) if found else ()

    def _judge(self, tokens: Sequence[int]) -> None:
        """Compares the last forecast with the tokens that have come since."""
        if not self._forecast or len(tokens) <= self._at:
            return
        came = tokens[self._at : self._at + len(self._forecast)]
        right = agreeing(self._forecast, came)
        self._right = GUESSES.decay * self._right + right
        self._judged = GUESSES.decay * self._judged + right + (right < len(came))

    def _length(self, worth: float) -> int:
        """How many tokens of a forecast have a chance of at least `worth`, if each is right with the recent rate."""
        rate = self._right / self._judged
        if rate < worth:
            return 0
        return GUESSES.longest if rate > GUESSES.sure else int(math.log(worth) / math.log(rate))


def agreeing(expected: Sequence[int], found: Sequence[int]) -> int:
    """The number of first tokens that both have in common."""
    for count, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return count
    return min(len(expected), len(found))


def _followers(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """The tokens from position `at` on, repeated if fewer than `count` are left: the text is in a loop then."""
    found = list(tokens[at : at + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found
