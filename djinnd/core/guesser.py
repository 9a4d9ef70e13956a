"""Guesses a session's next tokens: its latest tokens have occurred before, and the same may follow again.

They may have occurred in the session's own text, or in another session's of its tenant. A guess goes on at the place
where the last one came from, as long as the text has stayed the same as there. Otherwise the latest run of tokens is
looked up, first in the own text.

Each forecast is compared with the tokens that then come, whether a step has run it or not. So the guesser always knows
how often its forecasts come true, and a session of text without repetition pays for no guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from djinnd.core.runs import RUN, hash_of
from djinnd.core.shared_texts import SharedTexts
from djinnd.core.suffix_index import SuffixIndex
from djinnd.core.tuning import GUESSES

_SAME = RUN + 1  # tokens that stay the same at a place from which guesses go on: more than a look would compare


class Record:
    """How often recent forecasts of one kind have come true."""

    def __init__(self, rate: float = GUESSES.first_right / GUESSES.first_judged, decay: float = GUESSES.decay) -> None:
        """`rate`: the share of right tokens that is expected at first. `decay`: how much an earlier forecast counts,
        for each later one."""
        self._decay = decay
        # tokens of forecasts, decayed
        self._right, self._judged = rate * GUESSES.first_judged, GUESSES.first_judged

    def note(self, right: int, wrong: bool) -> None:
        """Notes a forecast with this many right tokens, and maybe a wrong one behind them."""
        self._right = self._decay * self._right + right
        self._judged = self._decay * self._judged + right + wrong

    @property
    def rate(self) -> float:
        """The recent share of right tokens."""
        return self._right / self._judged

    def length(self, worth: float) -> int:
        """How many tokens of a forecast have a chance of at least `worth`, if each is right with the recent rate."""
        rate = self.rate
        if rate < worth:
            return 0
        return GUESSES.longest if rate > GUESSES.sure else int(math.log(worth) / math.log(rate))


class Guesser:
    """The guesses of one session. `tokens` is its live text, `texts` are those of its tenant on its model, and `number`
    is its text's number there."""

    def __init__(self, tokens: Sequence[int], texts: SharedTexts) -> None:
        self._tokens = tokens
        self._texts = texts
        self.number = texts.join(tokens)
        self._index = SuffixIndex()
        self.own, self.others = Record(), Record()  # of forecasts from the own text, and from other texts
        self._forecast: Sequence[int] = ()  # the tokens expected from position `_at` on
        self._at = 0
        self._source = 0  # number of the text from which the last forecast came; 0: none
        self._ahead = 0  # how far the forecast's place in that text is ahead of its place in this one

    def close(self) -> None:
        """Takes the session's text from the others. No guess may follow."""
        self._texts.leave(self.number)

    def cut(self, length: int) -> None:
        """Notes that the session has kept only its first `length` tokens."""
        self._index.cut(length)
        if length < self._at:
            self._forecast, self._source = (), 0

    def guess(self, most: int, worth: float) -> tuple[int, ...]:
        """Expects at most `most` next tokens, each with a chance of at least `worth` to be right."""
        if self._forecast:
            self._judge()
        self._at = length = len(self._tokens)
        self._forecast = self._expected(length) if length >= RUN else ()
        return tuple(self._forecast[: min(most, self._record.length(worth))]) if self._forecast else ()

    @property
    def _record(self) -> Record:
        return self.own if self._source == self.number else self.others

    def _judge(self) -> None:
        """Compares the last forecast with the tokens that have come since."""
        came = self._tokens[self._at : self._at + len(self._forecast)]
        if came:
            right = agreeing(self._forecast, came)
            self._record.note(right, right < len(came))

    def _expected(self, length: int) -> Sequence[int]:
        """The next tokens, as they follow at the place that `_find` knows. Adds the latest runs to both tables."""
        tokens, index = self._tokens, self._index
        if index.end < length - 1:
            self._texts.add(self.number, *index.follow(tokens, length - 1))
        latest = hash_of(tokens, length)
        found = self._find(tokens, length, latest)
        if index.end == length - 1:
            index.add(latest)
            self._texts.add(self.number, length, (latest,))
        return _followers(*found, GUESSES.longest, loops=self._source == self.number) if found else ()

    def _find(self, tokens: Sequence[int], length: int, latest: int) -> tuple[Sequence[int], int] | None:
        """A text with the latest tokens, and the position behind them: where the last forecast came from if the text
        has gone on as there, or else where the latest run was last seen. `latest` is the run's hash."""
        text, at = self._texts.text(self._source), length + self._ahead
        if at < len(text) and text[at - _SAME : at] == tokens[length - _SAME :]:
            return text, at
        own = self._index.last(tokens, latest)
        found = (self.number, own) if own else self._texts.last(tokens, latest, besides=self.number)
        if found is None:
            return None
        self._source, at = found
        self._ahead = at - length
        return self._texts.text(self._source), at


def agreeing(expected: Sequence[int], found: Sequence[int]) -> int:
    """The number of first tokens that both have in common."""
    for count, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return count
    return min(len(expected), len(found))


def _followers(text: Sequence[int], at: int, count: int, *, loops: bool) -> Sequence[int]:
    """At most `count` tokens of the text from position `at` on. If it is in a loop, they are repeated up to `count`."""
    found = text[at : at + count]
    while loops and len(found) < count:
        found = [*found, *found[: count - len(found)]]
    return found
