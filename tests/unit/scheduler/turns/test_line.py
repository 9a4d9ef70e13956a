from __future__ import annotations

import math
from collections.abc import Collection

import pytest

from djinn_client.protocol import Class
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.scheduler.turns.line import SEAT, Line
from djinnd.scheduler.turns.shares import Shares

ROW_S = 0.01


def joined(line: Line, name: str, klass: Class = "agent", tenant: int = 1, deadline: float = math.inf) -> Session:
    session = Session(name, "m", tenant, klass)
    session.request = Request(1, 0, 1, 8, deadline=deadline)
    line.join(session, latest_start=deadline)
    return session


def order(
    line: Line,
    shares: Shares | None = None,
    holding: Collection[str] = (),
    aged: Session | None = None,
    lengthy: Collection[str] = (),
) -> list[str]:
    classes = line.in_order(shares or Shares(), ROW_S, set(holding), set(lengthy), aged)
    return [session.id for sessions in classes for session in sessions]


def test_classes_are_served_strictly_one_after_another() -> None:
    line = Line()
    for name, klass in (("b", "batch"), ("a", "agent"), ("i", "interactive"), ("a2", "agent")):
        joined(line, name, klass)  # type: ignore[arg-type]
    assert order(line) == ["i", "a", "a2", "b"]
    assert line.foremost() == "interactive"


def test_the_aged_one_comes_first_and_once() -> None:
    line = Line()
    joined(line, "i", "interactive")
    aged = joined(line, "b", "batch")
    joined(line, "b2", "batch")
    assert order(line, aged=aged) == ["b", "i", "b2"]


def test_tenants_take_turns_row_by_row_however_many_sessions_they_have() -> None:
    line = Line()
    for name in ("a1", "a2", "a3", "a4", "a5"):
        joined(line, name, tenant=1)
    for name in ("b1", "b2"):
        joined(line, name, tenant=2)
    assert order(line) == ["a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_tenants_take_turns_by_their_weights() -> None:
    line, shares = Line(), Shares()
    shares.set_weight(1, 3.0)
    for number in range(9):
        joined(line, f"a{number}", tenant=1)
        joined(line, f"b{number}", tenant=2)
    turns = [name[0] for name in order(line, shares)[:8]]
    assert (turns.count("a"), turns.count("b")) == (6, 2)


def test_the_tenant_with_the_clock_behind_goes_first_until_it_has_caught_up() -> None:
    line, shares = Line(), Shares()
    shares.charge("agent", 1, 2.5 * ROW_S)
    for number in range(4):
        joined(line, f"a{number}", tenant=1)
        joined(line, f"b{number}", tenant=2)
    assert order(line, shares)[:5] == ["b0", "b1", "b2", "a0", "b3"]


def test_clocks_of_one_class_have_no_effect_in_another() -> None:
    line, shares = Line(), Shares()
    shares.charge("batch", 1, 100.0)
    joined(line, "a", tenant=1)
    joined(line, "b", tenant=2)
    assert order(line, shares) == ["a", "b"]


def test_a_session_with_pages_keeps_its_seat_until_its_tenant_is_ahead() -> None:
    line, shares = Line(), Shares()
    joined(line, "sits", tenant=2)
    joined(line, "waits", tenant=1)
    assert order(line, shares, holding=["sits"]) == ["sits", "waits"]
    shares.charge("agent", 2, SEAT * 0.9)
    assert order(line, shares, holding=["sits"]) == ["sits", "waits"]
    shares.charge("agent", 2, SEAT * 0.2)
    assert order(line, shares, holding=["sits"]) == ["waits", "sits"]
    assert order(line, shares, holding=["sits", "waits"]) == ["waits", "sits"]


def test_sessions_with_pages_come_first_within_their_tenant() -> None:
    line = Line()
    for name in ("a", "b", "c", "d"):
        joined(line, name)
    assert order(line) == ["a", "b", "c", "d"]
    assert order(line, holding=["d", "b"]) == ["b", "d", "a", "c"]


def test_sessions_with_deadlines_come_first_in_order_of_latest_start() -> None:
    line = Line()
    joined(line, "none")
    joined(line, "late", deadline=9.0)
    joined(line, "soon", deadline=3.0)
    assert order(line, holding=["none"]) == ["soon", "late", "none"]


def test_a_deadline_counts_only_within_its_tenant_and_class() -> None:
    line = Line()
    joined(line, "a", tenant=1)
    joined(line, "high", "interactive", tenant=2)
    joined(line, "b1", tenant=2)
    joined(line, "b2", tenant=2, deadline=1.0)
    assert order(line) == ["high", "a", "b2", "b1"]


def test_a_deadline_goes_with_its_request() -> None:
    line = Line()
    first = joined(line, "first", deadline=3.0)
    joined(line, "second")
    line.leave(first)
    first.request = Request(2, 0, 1, 8)
    line.join(first)
    assert order(line) == ["second", "first"]


def test_a_session_leaves_the_line_although_its_class_has_changed() -> None:
    line = Line()
    session, other = joined(line, "a"), joined(line, "b", "batch", tenant=2)
    session.klass = "interactive"
    line.leave(session)
    line.leave(session)
    assert order(line) == ["b"] and line.foremost() == "batch"
    assert not line.tenants("agent") and set(line.tenants("batch")) == {2}
    line.check_integrity({"b": other})
    line.leave(other)
    assert line.foremost() is None and order(line) == []
    line.check_integrity({})


def test_the_audit_finds_a_session_in_a_wrong_place() -> None:
    line = Line()
    session = joined(line, "a")
    line.check_integrity({"a": session})
    with pytest.raises(AssertionError, match="active"):
        line.check_integrity({})
    session.klass = "batch"
    with pytest.raises(AssertionError):
        line.check_integrity({"a": session})


def test_a_session_with_much_to_read_comes_after_others_of_its_tenant() -> None:
    line = Line()
    for name in ("a", "b", "c", "d"):
        joined(line, name)
    joined(line, "deadline", deadline=1.0)
    joined(line, "another's", tenant=2)
    lengthy = ["a", "c", "deadline", "another's"]
    assert order(line, lengthy=lengthy) == ["deadline", "another's", "b", "d", "a", "c"]


def test_sessions_with_much_to_read_keep_their_place_while_pages_are_short() -> None:
    line = Line()
    for name in ("a", "b", "c", "d"):
        joined(line, name)
    assert order(line, lengthy=["a", "c"], holding=["c", "d"]) == ["c", "d", "a", "b"]


def test_a_seated_session_behind_one_with_a_deadline_keeps_its_seat() -> None:
    """The tenant's first session has its turn by the clock alone; the next one is still seated."""
    line, shares = Line(), Shares()
    shares.charge("agent", 1, 2.5 * ROW_S)
    joined(line, "sits", tenant=1)
    joined(line, "urgent", tenant=1, deadline=1.0)
    for number in range(5):
        joined(line, f"b{number}", tenant=2)
    assert order(line, shares, holding=["sits"]) == ["b0", "b1", "b2", "urgent", "sits", "b3", "b4"]


def test_ties_between_tenants_go_to_the_lower_number() -> None:
    line = Line()
    for tenant in (3, 1, 2):
        for number in range(2):
            joined(line, f"{tenant}{number}", tenant=tenant)
    assert order(line) == ["10", "20", "30", "11", "21", "31"]
