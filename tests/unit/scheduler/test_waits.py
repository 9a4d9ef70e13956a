from __future__ import annotations

import pytest

from djinnd.scheduler import waits as waits_module
from djinnd.scheduler.waits import KNOWN_AFTER, Expected, Waits


def waited(waits: Waits, *seconds: float, tenant: int = 1, tool: str = "search") -> None:
    for each in seconds:
        waits.begin("s", tenant, tool, 100.0)
        waits.end("s", 100.0 + each)


def test_three_equal_waits_are_expected_to_repeat() -> None:
    waits = Waits()
    for _ in range(KNOWN_AFTER):
        assert waits.expected(1, "search") is None
        waited(waits, 8.0)
    assert waits.expected(1, "search") == 8.0


def test_waits_that_differ_are_expected_earlier() -> None:
    waits = Waits()
    waited(waits, 10.0, 14.0, 12.0)
    # The means are 10, 12 and 12. The last two waits differ from the mean before them by 4 and 0.
    assert waits.expected(1, "search") == pytest.approx(12.0 - 2.0)


def test_waits_that_differ_wildly_give_no_expectation() -> None:
    waits = Waits()
    waited(waits, 0.1, 60.0, 0.1, 60.0)
    assert waits.expected(1, "search") is None


def test_a_change_is_learned() -> None:
    waits = Waits()
    waited(waits, *[2.0] * 50)
    waited(waits, *[20.0] * 50)
    assert waits.expected(1, "search") == pytest.approx(20.0, rel=0.02)


def test_each_tenant_and_tool_is_learned_separately() -> None:
    waits = Waits()
    waited(waits, *[2.0] * 3)
    waited(waits, *[3.0] * 3, tenant=2)
    waited(waits, *[4.0] * 3, tool="")
    assert [waits.expected(1, "search"), waits.expected(2, "search"), waits.expected(1, "")] == [2.0, 3.0, 4.0]
    assert waits.expected(2, "") is None


def test_only_the_last_wait_of_a_session_counts() -> None:
    waits = Waits()
    for _ in range(3):
        waits.begin("s", 1, "search", 0.0)
        waits.begin("s", 1, "read", 5.0)
        waits.end("s", 6.0)
        waits.end("s", 60.0)
    assert (waits.expected(1, "search"), waits.expected(1, "read")) == (None, 1.0)


def test_an_end_without_a_beginning_has_no_effect() -> None:
    waits = Waits()
    waits.end("s", 5.0)
    assert waits.expected(1, "") is None


def test_the_least_recently_used_tool_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "MOST_TOOLS", 2)
    waits = Waits()
    waited(waits, *[1.0] * 3, tool="one")
    waited(waits, *[2.0] * 3, tool="two")
    assert waits.expected(1, "one") == 1.0
    waited(waits, *[3.0] * 3, tool="three")
    assert [waits.expected(1, tool) for tool in ("one", "two", "three")] == [1.0, None, 3.0]


def test_the_oldest_open_waits_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "MOST_WAITS", 2)
    waits = Waits()
    for _ in range(waits_module.KNOWN_AFTER):
        for name in ("closed", "a", "b"):
            waits.begin(name, 1, name, 0.0)
        for name in ("closed", "a", "b"):
            waits.end(name, 1.0)
    assert [waits.expected(1, tool) for tool in ("closed", "a", "b")] == [None, 1.0, 1.0]


def test_sessions_that_already_wait_are_expected_once_the_tool_is_known() -> None:
    waits = Waits()
    waits.begin("early", 1, "search", 98.0)
    waits.begin("elsewhere", 1, "read", 98.0)
    waits.begin("another's", 2, "search", 98.0)
    waits.begin("gone", 1, "search", 98.0)
    waits.end("gone", 106.0)
    for number in range(KNOWN_AFTER):
        waits.begin(f"late {number}", 1, "search", 100.0)
    told = [waits.end(f"late {number}", 108.0) for number in range(KNOWN_AFTER)]
    last = [Expected("early", 98.0, 8.0), Expected(f"late {KNOWN_AFTER - 1}", 100.0, 8.0)]
    assert told == [[], last, []], "the first that was gone counts, too"
    assert waits.end("early", 110.0) == [], "it was known before"


def test_waiting_sessions_are_not_expected_if_waits_differ_wildly() -> None:
    waits = Waits()
    waits.begin("other", 1, "search", 100.0)
    waited(waits, 0.1, 60.0)
    waits.begin("s", 1, "search", 100.0)
    assert waits.end("s", 100.1) == []
