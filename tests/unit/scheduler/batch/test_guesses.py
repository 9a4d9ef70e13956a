from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from djinnd.core.batch import Row
from djinnd.core.guesser import Guesser
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.shared_texts import SharedTexts
from djinnd.core.tuning import GUESSES
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.batch.guesses import Guesses
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import TIMES
from tests.support.virtual import measured, rising

LOOP = [1, 2, 3, 4] * 8  # the next tokens are 1, 2, 3, 4, 1 …
PAGE = 64
FREE = StepTimes()
measured(FREE, rising(0.01, 0.0))


def made(
    *texts: list[int],
    max_tokens: int = 100,
    may_guess: bool = True,
    stop: frozenset[int] = frozenset(),
    page: int = PAGE,
    tenants: Sequence[int] = (0, 0),
) -> tuple[list[Row], KvManager]:
    """Rows that decode, of sessions with these tokens, which belong to the tenants by turns."""
    kv, rows = KvManager(100, page, 1 << 20, 1 << 12), []
    for number, tokens in enumerate(texts):
        request = Request(number, 0, len(tokens) - 1, max_tokens, stop_tokens=stop, may_guess=may_guess)
        session = Session(f"s{number}", "m", tenants[number % 2], "agent", [*tokens], len(tokens) - 1, request)
        kv.reserve(session.id, 0, len(tokens))
        rows.append(Row(session, request, len(tokens) - 1, 1, 0, 2, max_tokens > 0))
    return rows, kv


def guesses(
    rows: list[Row], kv: KvManager, room: int = 1000, times: StepTimes = FREE, limit: int = 1 << 12
) -> list[tuple[int, ...]]:
    found = Guesses(times, kv, lambda tenant: limit).added(rows, room)
    for before, after in zip(rows, found, strict=True):
        assert (after.session, after.start, after.count) == (before.session, before.start, 1 + len(after.guess))
        assert after.decodes
    return [row.guess for row in found]


def sure(rows: list[Row]) -> None:
    """From now on the sessions' guesses are as long as they may be."""
    for row in rows:
        row.session.guesser = Guesser(row.session.tokens, SharedTexts())
        row.session.guesser.own._right = row.session.guesser.own._judged = 10.0


def test_a_session_that_repeats_itself_gets_a_guess_and_another_none() -> None:
    rows, kv = made(LOOP, list(range(30)))
    assert guesses(rows, kv) == [(1, 2), ()]


def test_a_guess_is_as_long_as_its_session_is_sure() -> None:
    rows, kv = made(LOOP)
    sure(rows)
    assert guesses(rows, kv) == [tuple(LOOP[: GUESSES.longest])]


def test_only_requests_that_may_guess_get_one() -> None:
    assert guesses(*made(LOOP, may_guess=False)) == [()]
    assert guesses(*made(LOOP, max_tokens=0)) == [()]


@pytest.mark.parametrize("room", [0, 1, 3, 5])
def test_guesses_take_only_what_is_left_in_serving_order(room: int) -> None:
    rows, kv = made(LOOP, LOOP)
    lengths = [len(guess) for guess in guesses(rows, kv, room)]
    assert lengths == [min(2, room), min(2, max(room - 2, 0))]


@pytest.mark.parametrize(("max_tokens", "count"), [(1, 0), (2, 0), (3, 1), (6, 4)])
def test_a_request_never_gets_more_than_its_tokens(max_tokens: int, count: int) -> None:
    rows, kv = made(LOOP, max_tokens=max_tokens)  # it has one
    sure(rows)
    assert len(guesses(rows, kv)[0]) == count


def test_a_guess_stays_within_the_pages_of_its_session_and_its_limit() -> None:
    rows, kv = made(LOOP, page=len(LOOP) + 5)
    sure(rows)
    assert len(guesses(rows, kv)[0]) == 5
    assert len(guesses(rows, kv, limit=len(LOOP) + 4)[0]) == 3
    assert guesses(rows, kv, limit=len(LOOP)) == [()]


def test_a_guess_ends_before_a_stop_token() -> None:
    rows, kv = made(LOOP, stop=frozenset([3]))
    sure(rows)
    assert guesses(rows, kv) == [(1, 2)]


@pytest.mark.parametrize(
    ("seconds", "rows", "expected"),
    [
        ({1: 0.01}, 1, 2),  # a step takes no longer with further tokens
        ({1: 0.01, 4: 0.012}, 1, 2),  # each costs a twentieth of a step
        ({1: 0.01, 4: 0.03}, 1, 1),  # each costs half of a step
        ({1: 0.01, 4: 0.05}, 1, 0),  # each costs a step
    ],
)
def test_a_guess_is_run_if_it_saves_more_than_it_costs(seconds: Mapping[int, float], rows: int, expected: int) -> None:
    times = StepTimes()
    for _ in range(4):
        times.note(rows, 0, seconds[1])
    for _ in range(4):
        for tokens, takes in seconds.items():
            times.note(rows, tokens, takes)
    found, kv = made(*[LOOP] * rows)
    assert [len(guess) for guess in guesses(found, kv, times=times)] == [expected] * rows


def test_a_step_with_too_many_sessions_to_look_for_guesses_runs_none() -> None:
    few, many = (round(GUESSES.lookup_share * seconds / GUESSES.lookup_s) for seconds in (0.009, 0.011))
    assert set(guesses(*made(*[LOOP] * few))) == {(1, 2)}
    assert set(guesses(*made(*[LOOP] * many))) == {()}


def test_guesses_are_tried_until_their_cost_is_known() -> None:
    times = StepTimes()
    for _ in range(4):
        times.note(1, 0, 0.01)
        times.note(1, 512, 0.5)  # a prompt
    assert times.of_guess(4) == 0.0
    assert guesses(*made(LOOP), times=times) == [(1, 2)]
    for _ in range(4):
        times.note(1, 4, 0.05)
    assert math.isclose(times.of_guess(4), 0.04)
    assert guesses(*made(LOOP), times=times) == [()]


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ({}, (0.0, 0.0)),
        ({32: 0.0064}, (0.0, 0.0002)),  # short guesses were not measured: as if a step with them took no longer
        ({8: 0.002, 32: 0.0026}, (0.0018, 0.000025)),
        ({8: 0.001, 32: 0.008}, (0.0, 0.00025)),  # the first tokens are the cheapest
    ],
)
def test_the_cost_of_a_draft_s_guesses_is_of_any_guess_and_of_each_token(
    further: Mapping[int, float], expected: tuple[float, float]
) -> None:
    times = StepTimes()
    for _ in range(TIMES.sure + 1):
        times.note(8, 0, 0.01)
    for tokens, seconds in further.items():
        for _ in range(TIMES.sure + 1):
            times.note(8, tokens, 0.01 + seconds)
    _, kv = made(LOOP)
    assert Guesses(times, kv, lambda tenant: 100).costs(8) == pytest.approx(expected)


def test_guesses_that_seem_too_dear_are_tried_again_after_a_while() -> None:
    rows, kv = made(LOOP)
    times = StepTimes()
    measured(times, rising(0.01, 0.01))
    dear = Guesses(times, kv, lambda tenant: 1 << 12)
    tried = [bool(dear.added(rows, 100)[0].guess) for _ in range(2 * GUESSES.again + 2)]
    assert [step for step, guess in enumerate(tried) if guess] == [GUESSES.again, 2 * GUESSES.again + 1]


# --- from other sessions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenants", "expected"), [((1, 1), (3, 4)), ((1, 2), ())])
def test_a_session_is_guessed_from_its_tenant_s_sessions_only(
    tenants: tuple[int, int], expected: tuple[int, ...]
) -> None:
    rows, kv = made([0, 1, 2, 3, 4, 5], [9, 8, 0, 1, 2], tenants=tenants)
    several = Guesses(FREE, kv, lambda tenant: 1 << 12)
    assert [row.guess for row in several.added(rows, 100)] == [(), expected]
    several.check_integrity([row.session for row in rows])


def test_a_closed_session_leaves_nothing_behind() -> None:
    rows, kv = made([0, 1, 2, 3, 4, 5], [9, 8, 0, 1, 2])
    several = Guesses(FREE, kv, lambda tenant: 1 << 12)
    several.added(rows[:1], 100)
    several.close(rows[0].session)
    several.check_integrity([])
    assert [row.guess for row in several.added(rows[1:], 100)] == [()]
    several.close(rows[1].session)
    assert not several._texts
    several.close(rows[1].session)
