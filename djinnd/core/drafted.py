"""One session as its model's draft knows it: which tokens have KV there, and how often its guesses have come true.

    tokens     5 8 2 9 7              the session's text when the draft ran
    guess                4 1 3
    KV         5 8 2 9 7 4 1
    came                 4 1 6

Three passes make such a guess: the first runs all that is new, each other one a guessed token. Here the KV of 4 and 1
is right and stays, and the next pass begins at 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from djinnd.core.guesser import Record, agreeing
from djinnd.core.tuning import DRAFTS


def record_of_draft(rate: float = DRAFTS.first_rate) -> Record:
    """`rate`: the share of right tokens that is expected at first."""
    return Record(rate, DRAFTS.decay)


class Drafted:
    """`tokens` is the session's live text. `record`: of the draft's guesses in this session."""

    def __init__(self, tokens: Sequence[int], record: Record) -> None:
        self._tokens = tokens
        self.record = record
        self.first = 0  # the position at which the text begins that the draft knows
        self.computed = 0  # first tokens of the text with KV in the draft
        self.idle_steps = 0  # of the session, since a guess last seemed to pay
        self._guess: Sequence[int] = ()  # not compared yet
        self._at = 0  # the position of its first token

    @property
    def missing(self) -> int:
        """Tokens that the draft has to run before it can guess the next one."""
        return len(self._tokens) - self.computed

    @property
    def is_ready(self) -> bool:
        """True if the draft can guess the next token."""
        return True

    def cut(self, length: int) -> None:
        """Notes that the session has kept only its first `length` tokens."""
        self.computed = min(self.computed, length)
        if length < self._at:
            self._guess = ()

    def lose(self) -> None:
        """Notes that the draft's KV is gone."""
        self.computed, self._guess = 0, ()

    def ran(self, computed: int) -> None:
        """Notes that the draft has run the first `computed` tokens and has guessed nothing."""
        self.computed = computed

    def guessed(self, guess: Sequence[int]) -> None:
        """Notes a guess of the next tokens: all tokens have KV now, and all guessed ones but the last."""
        self.computed = self._at = len(self._tokens)
        self._guess = guess

    def note_worth(self, *, pays: bool) -> None:
        """Notes in each step that could run a guess of the session if a guess seems to pay. If none has for long, the
        first rate is expected again."""
        self.idle_steps = 0 if pays else self.idle_steps + 1
        if self.idle_steps == DRAFTS.again:
            self.record, self.idle_steps = record_of_draft(), 0

    def settle(self) -> tuple[int, bool]:
        """Compares the last guess with the tokens that have come since, and keeps the KV of those that were right. The
        last token is run again in any case, for its logits.

        → how many were right, and whether a wrong one came behind them; (0, False): there was nothing to compare.
        """
        guess, self._guess = self._guess, ()
        came = self._tokens[self._at : self._at + len(guess)]
        right = agreeing(guess, came)
        self._keep_kv(right, guess, came)
        if not came:
            return 0, False
        wrong = right < len(came)
        self.record.note(right, wrong)
        return right, wrong

    def _keep_kv(self, right: int, guess: Sequence[int], came: Sequence[int]) -> None:
        """Keeps the KV of the first `right` tokens of the guess."""
        if came:
            self.computed = self._at + min(right, len(guess) - 1)
        self.computed = min(self.computed, len(self._tokens) - 1)
