from __future__ import annotations

import math
from collections.abc import Collection

import pytest

from djinn_client.protocol import Class
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.scheduler.tuning import FAIRNESS
from djinnd.scheduler.turns.run_queue import RunQueue
from djinnd.scheduler.turns.shares import Shares

ROW_S = 0.01


def joined(
    queue: RunQueue, name: str, priority: Class = "agent", tenant: int = 1, deadline: float = math.inf
) -> Session:
    session = Session(name, "m", tenant, priority)
    session.request = Request(1, 0, 1, 8, deadline=deadline)
    queue.join(session, latest_start=deadline)
    return session


def order(
    queue: RunQueue,
    shares: Shares | None = None,
    holding: Collection[str] = (),
    aged: Session | None = None,
    lengthy: Collection[str] = (),
) -> list[str]:
    classes = queue.in_order(shares or Shares(), ROW_S, set(holding), set(lengthy), aged)
    return [session.id for sessions in classes for session in sessions]


def test_classes_are_served_strictly_one_after_another() -> None:
    queue = RunQueue()
    for name, priority in (("b", "batch"), ("a", "agent"), ("i", "interactive"), ("a2", "agent")):
        joined(queue, name, priority)  # type: ignore[arg-type]
    assert order(queue) == ["i", "a", "a2", "b"]


def test_the_aged_one_comes_first_and_once() -> None:
    queue = RunQueue()
    joined(queue, "i", "interactive")
    aged = joined(queue, "b", "batch")
    joined(queue, "b2", "batch")
    assert order(queue, aged=aged) == ["b", "i", "b2"]


def test_tenants_take_turns_row_by_row_however_many_sessions_they_have() -> None:
    queue = RunQueue()
    for name in ("a1", "a2", "a3", "a4", "a5"):
        joined(queue, name, tenant=1)
    for name in ("b1", "b2"):
        joined(queue, name, tenant=2)
    assert order(queue) == ["a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_tenants_take_turns_by_their_weights() -> None:
    queue, shares = RunQueue(), Shares()
    shares.set_weight(1, 3.0)
    for number in range(9):
        joined(queue, f"a{number}", tenant=1)
        joined(queue, f"b{number}", tenant=2)
    turns = [name[0] for name in order(queue, shares)[:8]]
    assert (turns.count("a"), turns.count("b")) == (6, 2)


def test_the_tenant_with_the_clock_behind_goes_first_until_it_has_caught_up() -> None:
    queue, shares = RunQueue(), Shares()
    shares.charge("agent", 1, 2.5 * ROW_S)
    for number in range(4):
        joined(queue, f"a{number}", tenant=1)
        joined(queue, f"b{number}", tenant=2)
    assert order(queue, shares)[:5] == ["b0", "b1", "b2", "a0", "b3"]


def test_clocks_of_one_class_have_no_effect_in_another() -> None:
    queue, shares = RunQueue(), Shares()
    shares.charge("batch", 1, 100.0)
    joined(queue, "a", tenant=1)
    joined(queue, "b", tenant=2)
    assert order(queue, shares) == ["a", "b"]


def test_a_session_with_pages_keeps_its_seat_until_its_tenant_is_ahead() -> None:
    queue, shares = RunQueue(), Shares()
    joined(queue, "sits", tenant=2)
    joined(queue, "waits", tenant=1)
    assert order(queue, shares, holding=["sits"]) == ["sits", "waits"]
    shares.charge("agent", 2, FAIRNESS.seat_s * 0.9)
    assert order(queue, shares, holding=["sits"]) == ["sits", "waits"]
    shares.charge("agent", 2, FAIRNESS.seat_s * 0.2)
    assert order(queue, shares, holding=["sits"]) == ["waits", "sits"]
    assert order(queue, shares, holding=["sits", "waits"]) == ["waits", "sits"]


def test_sessions_with_pages_come_first_within_their_tenant() -> None:
    queue = RunQueue()
    for name in ("a", "b", "c", "d"):
        joined(queue, name)
    assert order(queue) == ["a", "b", "c", "d"]
    assert order(queue, holding=["d", "b"]) == ["b", "d", "a", "c"]


def test_sessions_with_deadlines_come_first_in_order_of_latest_start() -> None:
    queue = RunQueue()
    joined(queue, "none")
    joined(queue, "late", deadline=9.0)
    joined(queue, "soon", deadline=3.0)
    assert order(queue, holding=["none"]) == ["soon", "late", "none"]


def test_a_deadline_counts_only_within_its_tenant_and_class() -> None:
    queue = RunQueue()
    joined(queue, "a", tenant=1)
    joined(queue, "high", "interactive", tenant=2)
    joined(queue, "b1", tenant=2)
    joined(queue, "b2", tenant=2, deadline=1.0)
    assert order(queue) == ["high", "a", "b2", "b1"]


def test_a_deadline_goes_with_its_request() -> None:
    queue = RunQueue()
    first = joined(queue, "first", deadline=3.0)
    joined(queue, "second")
    queue.leave(first)
    first.request = Request(2, 0, 1, 8)
    queue.join(first)
    assert order(queue) == ["second", "first"]


def test_a_session_leaves_the_line_although_its_class_has_changed() -> None:
    queue = RunQueue()
    session, other = joined(queue, "a"), joined(queue, "b", "batch", tenant=2)
    session.priority = "interactive"
    queue.leave(session)
    queue.leave(session)
    assert order(queue) == ["b"]
    assert not queue.tenants("agent") and set(queue.tenants("batch")) == {2}
    queue.check_integrity({"b": other})
    queue.leave(other)
    assert order(queue) == []
    queue.check_integrity({})


def test_the_audit_finds_a_session_in_a_wrong_place() -> None:
    queue = RunQueue()
    session = joined(queue, "a")
    queue.check_integrity({"a": session})
    with pytest.raises(AssertionError, match="active"):
        queue.check_integrity({})
    session.priority = "batch"
    with pytest.raises(AssertionError):
        queue.check_integrity({"a": session})


def test_a_session_with_much_to_read_comes_after_others_of_its_tenant() -> None:
    queue = RunQueue()
    for name in ("a", "b", "c", "d"):
        joined(queue, name)
    joined(queue, "deadline", deadline=1.0)
    joined(queue, "another's", tenant=2)
    lengthy = ["a", "c", "deadline", "another's"]
    assert order(queue, lengthy=lengthy) == ["deadline", "another's", "b", "d", "a", "c"]


def test_sessions_with_much_to_read_keep_their_place_while_pages_are_short() -> None:
    queue = RunQueue()
    for name in ("a", "b", "c", "d"):
        joined(queue, name)
    assert order(queue, lengthy=["a", "c"], holding=["c", "d"]) == ["c", "d", "a", "b"]


def test_a_seated_session_behind_one_with_a_deadline_keeps_its_seat() -> None:
    """The tenant's first session has its turn by the clock alone; the next one is still seated."""
    queue, shares = RunQueue(), Shares()
    shares.charge("agent", 1, 2.5 * ROW_S)
    joined(queue, "sits", tenant=1)
    joined(queue, "urgent", tenant=1, deadline=1.0)
    for number in range(5):
        joined(queue, f"b{number}", tenant=2)
    assert order(queue, shares, holding=["sits"]) == ["b0", "b1", "b2", "urgent", "sits", "b3", "b4"]


def test_ties_between_tenants_go_to_the_lower_number() -> None:
    queue = RunQueue()
    for tenant in (3, 1, 2):
        for number in range(2):
            joined(queue, f"{tenant}{number}", tenant=tenant)
    assert order(queue) == ["10", "20", "30", "11", "21", "31"]
