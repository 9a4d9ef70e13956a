from __future__ import annotations

import pytest

from djinnd.core.session import Session
from djinnd.scheduler.policy import Budget, eviction_order, serving_order


def session(name: str, remaining: int = 1, touched: int = 0) -> Session:
    return Session(name, "m", 1000, "interactive", tokens=[7] * (remaining + 2), computed=2, touched=touched)


def names(sessions: list[Session]) -> list[str]:
    return [session.id for session in sessions]


def shares(budget: Budget, sessions: list[Session]) -> list[int]:
    """What each gets when each takes its share in turn."""
    counts = []
    for session in sessions:
        counts.append(budget.share(session.remaining))
        if counts[-1]:
            budget.take(session.remaining, counts[-1])
    return counts


def test_who_comes_first_is_served_first() -> None:
    sessions = [session("b"), session("a"), session("c")]
    assert serving_order(iter(sessions)) == sessions


def test_the_idle_give_way_first_then_the_held_then_the_last_to_arrive() -> None:
    idle = [session("idle-late", touched=9), session("idle-early", touched=3)]
    held = [session("held-late", touched=8), session("held-early", touched=2)]
    order = [session("first"), session("served"), session("third"), session("fourth")]
    evicted = list(eviction_order(idle, held, order, order[1]))
    assert names(evicted) == ["idle-early", "idle-late", "held-early", "held-late", "fourth", "third"]


def test_the_last_in_order_takes_from_nobody_who_stands_before_it() -> None:
    order = [session("first"), session("served")]
    assert list(eviction_order([], [], order, order[1])) == []


@pytest.mark.parametrize(
    ("remaining", "max_tokens", "max_rows", "expected"),
    [
        ([1, 1, 1], 8, 8, [1, 1, 1]),
        ([1, 1, 1], 2, 8, [1, 1, 0]),
        ([1, 1, 1], 8, 2, [1, 1, 0]),
        ([20], 8, 8, [8]),
        ([5, 5, 5], 8, 8, [5, 3, 0]),
        ([5, 1, 5, 1], 8, 8, [5, 1, 1, 1]),  # those that decode, then chunks from what is left
        ([1, 5, 1, 5], 8, 3, [1, 5, 1, 0]),
        ([1, 20, 1, 1], 3, 8, [1, 0, 1, 1]),
        ([20, 1, 1, 1], 3, 8, [1, 1, 1, 0]),  # a token is kept for the first
        ([20, 1, 1, 1], 8, 3, [6, 1, 1, 0]),  # so is a row
        ([20, 1], 1, 8, [1, 0]),
        ([20, 1], 8, 1, [8, 0]),
        ([1, 20], 8, 1, [1, 0]),
    ],
)
def test_a_budget_is_shared_out(remaining: list[int], max_tokens: int, max_rows: int, expected: list[int]) -> None:
    order = [session(str(i), count) for i, count in enumerate(remaining)]
    assert shares(Budget(order, max_tokens, max_rows), order) == expected


def test_a_share_that_nobody_took_is_left_for_the_next() -> None:
    order = [session("a", 6), session("b", 6), session("c", 1), session("d", 1)]
    budget = Budget(order, max_tokens=8, max_rows=3)
    assert budget.share(6) == 6  # a finds no pages
    assert shares(budget, order[1:]) == [6, 1, 1]


def test_what_a_chunk_did_not_need_is_left_for_the_next() -> None:
    order = [session("a", 6), session("b", 6)]
    budget = Budget(order, max_tokens=8, max_rows=3)
    assert budget.share(6) == 6
    budget.take(6, 1)  # the rest of its prompt had been computed
    assert budget.share(6) == 6
