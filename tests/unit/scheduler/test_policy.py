from __future__ import annotations

import math

import pytest

from djinn_client.protocol import Class
from djinnd.core.batch import Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.scheduler.policy import Policy, Target, eviction_order


def session(name: str, remaining: int = 1, touched: int = 0, priority: Class = "batch") -> Session:
    return Session(name, "m", 1000, priority, tokens=[7] * (remaining + 2), computed=2, touched=touched)


def names(sessions: list[Session]) -> list[str]:
    return [session.id for session in sessions]


def test_idle_sessions_are_evicted_first_then_held_ones_then_the_last_to_arrive() -> None:
    idle = [session("idle-late", touched=9), session("idle-early", touched=3)]
    held = [session("held-late", touched=8), session("held-early", touched=2)]
    order = [session("first"), session("second")]
    evicted = list(eviction_order(idle, held, order))
    assert names(evicted) == ["idle-early", "idle-late", "held-early", "held-late", "second", "first"]


def test_waiting_sessions_are_evicted_first_in_reverse_order_of_their_expected_return() -> None:
    soon, late, talks, urgent = (session(name) for name in ("soon", "late", "talks", "urgent"))
    for one, until in ((soon, 5.0), (late, 50.0), (urgent, 500.0)):
        one.waits, one.wakes_at = True, until
    urgent.priority = "interactive"
    early, recent = session("early", touched=3), session("recent", touched=9)  # without an expected time
    early.waits = recent.waits = True
    evicted = list(eviction_order([talks, urgent, recent, soon, early, late], (), []))
    assert names(evicted) == ["late", "soon", "early", "recent", "urgent", "talks"]


def test_called_sessions_are_the_last_idle_ones_to_be_evicted() -> None:
    called, silent, waits = session("called", touched=1), session("silent", touched=9), session("waits", touched=5)
    called.called, called.priority, waits.waits = True, "batch", True
    assert names(list(eviction_order([called, silent, waits], (), []))) == ["waits", "silent", "called"]


@pytest.mark.parametrize(
    ("priority", "own", "target"),
    [
        ("interactive", {}, Target(0.04, 0.4)),
        ("batch", {}, Target()),
        ("agent", {"between_tokens": 0.01}, Target(0.01, 0.4)),
        ("interactive", {"between_tokens": math.inf, "first_token": 2.0}, Target(math.inf, 2.0)),
    ],
)
def test_a_request_s_own_targets_count_before_those_of_its_class(
    priority: Class, own: dict[str, float], target: Target
) -> None:
    one = session("a", priority=priority)
    one.request = Request(1, 0, 1, 8, **own)  # type: ignore[arg-type]
    assert Policy().target(one) == target


def test_protected_rows_decode_and_have_a_target() -> None:
    def row(priority: Class, count: int = 1, between: float | None = None) -> Row:
        one = session("a", priority=priority)
        one.request = Request(1, 0, 1, 8, between_tokens=between)
        return Row(one, one.request, 2, count, 0, 6, True)

    protects = Policy().protects
    assert protects(row("interactive")) and protects(row("agent")) and protects(row("batch", between=0.1))
    assert not any(map(protects, (row("batch"), row("agent", 2), row("interactive", between=math.inf))))
