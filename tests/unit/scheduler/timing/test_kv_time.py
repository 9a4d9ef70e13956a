from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

import pytest

from djinnd.scheduler.timing.kv_time import SLOPES, SOON, TELLING, KvTime

TOKEN_S = 2e-7
LONG, SHORT = 8 * TELLING, TELLING


def step(kv: int, rows: int = 4) -> float:
    """The seconds of a step."""
    return 0.008 + rows * 1e-4 + kv * TOKEN_S


def in_turns(known: KvTime, steps: int, more: Sequence[float] = (0.0,)) -> list[bool]:
    """Notes steps of long and short sessions in turns. Each takes longer than it should by the next value of `more`."""
    late = cycle(more)
    kv = [LONG if number % 2 else SHORT for number in range(steps)]
    return [known.note(4, tokens, step(tokens) + next(late)) for tokens in kv]


def test_the_time_of_a_token_is_the_slope_between_steps() -> None:
    known = KvTime()
    told = in_turns(known, 2 * SLOPES)
    assert told == [False] * (2 * SLOPES - 1) + [True]
    assert known.token_s == pytest.approx(TOKEN_S)


def test_a_token_takes_nothing_until_enough_slopes_are_known() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES - 1)
    assert known.token_s == 0.0


def test_outliers_change_little() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES, [0.0] * 9 + [0.03])
    assert known.token_s == pytest.approx(TOKEN_S)


def test_a_token_takes_nothing_if_steps_differ_by_chance() -> None:
    """In less than one case of twenty the result differs."""
    chance = random.Random(0)
    mistaken = 0
    for _ in range(400):
        known = KvTime()
        while not known.note(4, chance.choice((SHORT, LONG)), 0.008 + chance.gauss(0.0, 0.002)):
            pass
        mistaken += known.token_s > 0.0
    assert 0 < mistaken <= 20


def test_a_negative_slope_counts_as_zero() -> None:
    known = KvTime()
    for number in range(2 * SLOPES):
        known.note(4, (LONG, SHORT)[number % 2], (0.008, 0.009)[number % 2])
    assert known.token_s == 0.0


def test_steps_with_almost_the_same_kv_give_no_slope() -> None:
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(4, SHORT + number % 2 * (TELLING - 1), 1.0 + number % 2)
    assert known.token_s == 0.0


def test_small_differences_add_up_to_a_slope() -> None:
    known = KvTime()
    for number in range(2 * SLOPES * SOON):
        known.note(4, 32 * number, step(32 * number))
    assert known.token_s == pytest.approx(TOKEN_S)


def test_only_steps_with_the_same_number_of_rows_are_compared() -> None:
    """A session that joins brings both a row and KV."""
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(1 + number % 2, (SHORT, LONG)[number % 2], 1.0 + number % 2)
    assert known.token_s == 0.0


def test_steps_long_after_one_another_give_no_slope() -> None:
    known = KvTime()
    for number in range(10 * SLOPES):
        known.note(4, (SHORT, LONG)[number % 2], 1.0 + number % 2)
        for _ in range(SOON):
            known.note(1, SHORT, 0.5)
    assert known.token_s == 0.0


def test_a_change_is_learned() -> None:
    known = KvTime()
    in_turns(known, 2 * SLOPES)
    for number in range(2 * SLOPES):
        kv = (SHORT, LONG)[number % 2]
        known.note(4, kv, 0.02 + kv * 3 * TOKEN_S)
    assert known.token_s == pytest.approx(3 * TOKEN_S)
