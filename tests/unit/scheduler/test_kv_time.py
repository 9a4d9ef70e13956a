from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

import pytest

from djinnd.scheduler.kv_time import SLOPES, SOON, TELLING, KvTime

TOKEN_S = 2e-7
LONG, SHORT = 8 * TELLING, TELLING


def step(kv: int, rows: int = 4) -> float:
    """Seconds."""
    return 0.008 + rows * 1e-4 + kv * TOKEN_S


def in_turns(known: KvTime, steps: int, more: Sequence[float] = (0.0,)) -> list[bool]:
    """Steps of long and of short sessions, that take so much more than they should, over and over."""
    late = cycle(more)
    kv = [LONG if number % 2 else SHORT for number in range(steps)]
    return [known.note(4, tokens, step(tokens) + next(late)) for tokens in kv]


def test_a_token_takes_what_steps_that_read_more_take_longer() -> None:
    known = KvTime()
    told = in_turns(known, 2 * SLOPES)
    assert told == [False] * (2 * SLOPES - 1) + [True]
    assert known.token_s == pytest.approx(TOKEN_S)


def test_until_enough_is_known_it_takes_nothing() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES - 1)
    assert known.token_s == 0.0


def test_a_hiccup_now_and_then_changes_little() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES, [0.0] * 9 + [0.03])
    assert known.token_s == pytest.approx(TOKEN_S)


def test_where_chance_is_what_makes_steps_differ_a_token_takes_nothing() -> None:
    """As a rule: in less than one case of twenty it looks otherwise."""
    chance = random.Random(0)
    mistaken = 0
    for _ in range(400):
        known = KvTime()
        while not known.note(4, chance.choice((SHORT, LONG)), 0.008 + chance.gauss(0.0, 0.002)):
            pass
        mistaken += known.token_s > 0.0
    assert 0 < mistaken <= 20


def test_what_a_token_takes_less_than_nothing_is_nothing() -> None:
    known = KvTime()
    for number in range(2 * SLOPES):
        known.note(4, (LONG, SHORT)[number % 2], (0.008, 0.009)[number % 2])
    assert known.token_s == 0.0


def test_steps_that_read_almost_the_same_tell_nothing() -> None:
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(4, SHORT + number % 2 * (TELLING - 1), 1.0 + number % 2)
    assert known.token_s == 0.0


def test_small_differences_add_up_to_one_that_tells() -> None:
    known = KvTime()
    for number in range(2 * SLOPES * SOON):
        known.note(4, 32 * number, step(32 * number))
    assert known.token_s == pytest.approx(TOKEN_S)


def test_rows_are_no_kv() -> None:
    """Whoever joins brings both."""
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(1 + number % 2, (SHORT, LONG)[number % 2], 1.0 + number % 2)
    assert known.token_s == 0.0


def test_steps_long_after_one_another_differ_by_more_than_kv() -> None:
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(4, (SHORT, LONG)[number % 2], 1.0 + number % 2)
        for _ in range(SOON):
            known.note(1, SHORT, 0.5)
    assert known.token_s == 0.0


def test_what_changes_is_learned() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES)
    for number in range(2 * SLOPES):
        kv = (SHORT, LONG)[number % 2]
        known.note(4, kv, 0.02 + kv * 3 * TOKEN_S)
    assert known.token_s == pytest.approx(3 * TOKEN_S)
