"""Adds guesses to the rows of a step that decode, when all rows have been chosen.

A guess takes only what is left: tokens of the batch, seconds within the step's limits, and places in pages that the
session holds. So it costs no other session its row. Its length is such that no request can end with a guessed token but
the last one that is kept: the tokens that a step samples behind it need no cutting.

A guessed token that is right with chance p saves p / rows of a step. So it pays if it takes less than this share of the
step's time, as it does with streamed weights.

A session's guesses come from texts of its own tenant only, as its pages do: another's could tell what is in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence

import msgspec

from djinnd.core.batch import Row
from djinnd.core.guesser import Guesser
from djinnd.core.session import Session
from djinnd.core.shared_texts import SharedTexts
from djinnd.core.tuning import GUESSES
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.timing.step_times import StepTimes


class Guesses:
    """The guesses of one model's sessions. `limit_of`: the length in tokens that a tenant's session can reach."""

    def __init__(self, times: StepTimes, kv: KvManager, limit_of: Callable[[int], int]) -> None:
        self._times = times
        self._kv = kv
        self._limit_of = limit_of
        self._steps_without = 0  # since the last one with guesses
        self._texts: dict[int, SharedTexts] = {}  # by tenant, of its sessions that have a guesser

    def added(self, rows: Sequence[Row], room: int) -> list[Row]:
        """The rows, some of them with guesses of at most `room` tokens in all."""
        found, may_guess = list(rows), that_may_guess(rows)
        if not room or not self._may_look(rows, may_guess):
            return found
        worth = self._worth(rows, may_guess, room)
        self._steps_without += 1
        if worth >= 1.0:
            return found
        for index in may_guess:
            row = rows[index]
            if row.stage is None and room:
                guess = self._guess(row, min(room, self.most(row)), worth)
                if guess:
                    room -= len(guess)
                    self._steps_without = 0
                    found[index] = msgspec.structs.replace(row, count=1 + len(guess), guess=guess)
        return found

    def go_further(self, rows: Sequence[Row]) -> bool:
        """True if some row of a step that runs has a guess that goes beyond the token that the step samples for it. The
        next step should then be composed when that token is known."""
        may_guess = that_may_guess(rows)
        if not self._may_look(rows, may_guess):
            return False
        worth = self._worth(rows, may_guess, GUESSES.longest)
        return worth < 1.0 and any(len(self._guess(rows[at], self.most(rows[at]), worth)) > 1 for at in may_guess)

    def _may_look(self, rows: Sequence[Row], may_guess: Sequence[int]) -> bool:
        """True if looking for guesses of these rows takes a small share of the step's time."""
        seconds = self._times.predict(len(rows))
        allowed = GUESSES.lookup_share * seconds if seconds else math.inf
        return 0 < len(may_guess) * GUESSES.lookup_s <= allowed

    def _worth(self, rows: Sequence[Row], may_guess: Sequence[int], room: int) -> float:
        """The chance to be right from which on a guessed token pays in a step with these rows. `room`: the step's room
        for guessed tokens; the cost is predicted for this many, or for the usual number."""
        seconds, usual = self._times.predict(len(rows)), min(room, GUESSES.usual * len(may_guess))
        if not seconds or self._steps_without >= GUESSES.again:
            return GUESSES.least_chance
        return max(GUESSES.least_chance, self._times.of_guess(usual) / usual * len(rows) / seconds)

    def costs(self, guesses: int) -> tuple[float, float]:
        """Seconds that so many guesses of a draft add to a step, however short they are, and seconds of each of their
        tokens. 0 until they have been measured.

        A step with guesses runs other kernels than one without, and is not launched ahead of the last one's tokens. So
        guesses of one token take longer than a fourth of the time of guesses of four.
        """
        few, usual = guesses, GUESSES.usual * guesses
        of_few, of_usual = self._times.of_guess(few), self._times.of_guess(usual)
        a_token = (of_usual - of_few) / (usual - few)
        any_guess = of_few - few * a_token
        return (any_guess, a_token) if of_few and any_guess > 0.0 else (0.0, of_usual / usual)

    def most(self, row: Row) -> int:
        """The longest guess for the row: the step samples one token more."""
        session, request = row.session, row.request
        length = len(session.tokens)
        wanted = request.prompt_end + request.max_tokens
        held = self._kv.pages_held(session.id) * self._kv.page_size
        return max(min(held, wanted - 1, self._limit_of(session.tenant) - 1) - length, 0)

    def _guess(self, row: Row, most: int, worth: float) -> tuple[int, ...]:
        session, stop_tokens = row.session, row.request.stop_tokens
        if session.guesser is None:
            session.guesser = Guesser(session.tokens, self._texts.setdefault(session.tenant, SharedTexts()))
        return before_stop(session.guesser.guess(most, worth), stop_tokens)

    def close(self, session: Session) -> None:
        """Called when a session is closed: its text is no longer guessed from."""
        if session.guesser is not None:
            session.guesser.close()
            session.guesser = None
            if not self._texts[session.tenant].numbers():
                del self._texts[session.tenant]

    def check_integrity(self, sessions: Iterable[Session]) -> None:
        """Asserts that each tenant's texts are those of its open sessions."""
        texts = {tenant: shared.numbers() for tenant, shared in self._texts.items()}
        expected: dict[int, set[int]] = {}
        for session in sessions:
            if session.guesser is not None:
                expected.setdefault(session.tenant, set()).add(session.guesser.number)
        assert texts == expected, f"guesses know the texts {texts}, and the sessions are {expected}"


def before_stop(guess: tuple[int, ...], stop_tokens: Container[int]) -> tuple[int, ...]:
    """The guess up to its first stop token, which ends the request."""
    for count, token in enumerate(guess):
        if token in stop_tokens:
            return guess[:count]
    return guess


def that_may_guess(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows that decode, without a guess, and may have one."""
    return [at for at, row in enumerate(rows) if row.request.may_guess and row.samples and row.count == 1]
