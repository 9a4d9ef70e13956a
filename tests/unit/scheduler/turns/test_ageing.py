from __future__ import annotations

from djinnd.core.session import Session
from djinnd.scheduler.tuning import FAIRNESS
from djinnd.scheduler.turns.ageing import Ageing

AFTER = 10.0


def ageing_of(*names: str, now: float = 0.0) -> tuple[Ageing, list[Session]]:
    """Sessions that joined one second after another."""
    ageing, sessions = Ageing(AFTER), [Session(name, "m", 1, "batch") for name in names]
    for place, session in enumerate(sessions):
        ageing.joined(session, now + place)
    return ageing, sessions


def test_no_session_comes_first_before_its_time() -> None:
    ageing, (a, _) = ageing_of("a", "b")
    assert ageing.first(AFTER - 0.1) is None
    assert ageing.first(AFTER) is a


def test_the_first_stays_first_for_a_few_rows() -> None:
    ageing, (a, b) = ageing_of("a", "b")
    for row in range(FAIRNESS.aged_rows):
        assert ageing.first(20.0 + row) is a
        ageing.served([b], 20.0 + row)
        ageing.served([a], 20.0 + row)
    assert ageing.first(20.0 + FAIRNESS.aged_rows) is None


def test_free_rows_do_not_use_up_the_turn() -> None:
    ageing, (a, b) = ageing_of("a", "b")
    for row in range(3 * FAIRNESS.aged_rows):
        assert ageing.first(20.0 + row) is a
        ageing.served([a], 20.0 + row, free=a)
    for row in range(FAIRNESS.aged_rows):
        assert ageing.first(80.0 + row) is a
        ageing.served([a], 80.0 + row)
    assert ageing.first(80.0 + FAIRNESS.aged_rows) is b


def test_sessions_come_first_one_at_a_time_the_longest_without_a_row_before_others() -> None:
    ageing, _ = ageing_of("a", "b", "c")
    chosen: list[tuple[str, float]] = []
    for tenth in range(200, 520):
        now = tenth / 10
        first = ageing.first(now)
        if first is not None:
            if not chosen or chosen[-1][0] != first.id:
                chosen.append((first.id, now))
            ageing.served([first], now)
    assert chosen == [("a", 20.0), ("b", 30.0), ("c", 40.0), ("a", 50.0)]


def test_a_row_makes_a_session_younger() -> None:
    ageing, (a, b) = ageing_of("a", "b")
    ageing.served([a], 9.0)
    assert ageing.first(11.0) is b


def test_a_session_with_a_row_in_every_step_never_comes_first() -> None:
    ageing, (a,) = ageing_of("a")
    for now in range(0, 100, 5):
        assert ageing.first(now) is None
        ageing.served([a], now)


def test_no_session_comes_first_right_after_the_first_has_left() -> None:
    ageing, (a, b) = ageing_of("a", "b")
    assert ageing.first(30.0) is a
    ageing.left(a)
    ageing.left(a)
    assert ageing.first(30.0) is None
    assert ageing.first(30.0 + AFTER) is b


def test_a_session_that_joins_again_ages_from_then_on() -> None:
    ageing, (a, b) = ageing_of("a", "b")
    ageing.left(a)
    ageing.joined(a, 5.0)
    assert [session.id for session in ageing] == ["b", "a"]
    assert ageing.first(11.0) is b


def test_iteration_is_in_the_order_of_last_rows() -> None:
    ageing, (a, b, c) = ageing_of("a", "b", "c")
    ageing.served([b], 4.0)
    ageing.served([a], 5.0)
    assert list(ageing) == [c, b, a]
