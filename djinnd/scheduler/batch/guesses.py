"""Adds guesses to the rows of a step that decode, when all rows have been chosen.

A guess takes only what is left: tokens of the batch, seconds within the step's limits, and places in pages that the
session holds. So it costs no other session its row. Its length is such that no request can end with a guessed token but
the last one that is kept: the tokens that a step samples behind it need no cutting.

A guessed token that is right with chance p saves p / rows of a step. So it pays if it takes less than this share of the
step's time, as it does with streamed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from djinnd.core.batch import Row
from djinnd.core.guesser import Guesser
from djinnd.core.tuning import GUESSES
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.timing.step_times import StepTimes


def with_guesses(
    rows: Sequence[Row], room: int, times: StepTimes, kv: KvManager, limit_of: Callable[[int], int]
) -> list[Row]:
    """The rows, some of them with guesses of at most `room` tokens in all. `limit_of`: the length in tokens that a
    tenant's session can reach."""
    may_guess = [index for index, row in enumerate(rows) if row.request.may_guess and row.samples and row.count == 1]
    found = list(rows)
    if not may_guess or not room:
        return found
    seconds = times.predict(len(rows))
    if seconds and GUESSES.lookup_s * len(may_guess) > GUESSES.lookup_share * seconds:
        return found
    cost = times.of_guess(usual := min(room, GUESSES.usual * len(may_guess))) / usual
    worth = max(GUESSES.least_chance, cost * len(rows) / seconds if seconds else 0.0)
    if worth >= 1.0:
        return found
    for index in may_guess:
        row = rows[index]
        if row.stage is None and room:
            guess = _guess(row, min(room, _most(row, kv, limit_of(row.session.tenant))), worth)
            if guess:
                room -= len(guess)
                found[index] = msgspec.structs.replace(row, count=1 + len(guess), guess=guess)
    return found


def _most(row: Row, kv: KvManager, limit: int) -> int:
    """The longest guess for the row: the step samples one token more."""
    session, request = row.session, row.request
    length = len(session.tokens)
    wanted = request.prompt_end + request.max_tokens
    return max(min(kv.pages_held(session.id) * kv.page_size, wanted - 1, limit - 1) - length, 0)


def _guess(row: Row, most: int, worth: float) -> tuple[int, ...]:
    session, stop_tokens = row.session, row.request.stop_tokens
    if session.guesser is None:
        session.guesser = Guesser()
    guess = session.guesser.guess(session.tokens, most, worth)
    for count, token in enumerate(guess):
        if token in stop_tokens:
            return guess[:count]
    return guess
