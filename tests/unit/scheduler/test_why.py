from __future__ import annotations

import pytest

from djinn_client.errors import SessionNotFound
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.why import MOST_AHEAD
from tests.support.copies import copies
from tests.support.departures import all_leave
from tests.support.overwritten import overwrite_free_pages
from tests.support.virtual import PAGE, VirtualDevice, rising


def test_a_session_in_the_last_step_is_running() -> None:
    device = VirtualDevice()
    device.open("s", max_tokens=10)
    for left in (9, 8):
        device.step()
        why = device.scheduler.why("s")
        assert (why.state, why.figures) == ("running", {"step": 10 - left, "tokens_left": left})
        assert "model's last step" in why.reason and why.ahead == []


def test_a_running_session_says_how_many_guessed_tokens_were_right() -> None:
    device = VirtualDevice()
    session = device.open("s", max_tokens=10)
    device.step()
    assert session.request is not None
    session.request.guessed, session.request.kept = 8, 5
    figures = device.scheduler.why("s").figures
    assert (figures["guessed_tokens"], figures["kept_tokens"]) == (8, 5)


def test_no_more_tokens_are_left_than_the_session_can_reach() -> None:
    device = VirtualDevice()
    device.open("s", max_tokens=1 << 30)
    device.step()
    limit = device.scheduler.queues["m"].limit
    session = device.scheduler.session("s")
    assert device.scheduler.why("s").figures["tokens_left"] == limit - len(session.tokens)


def test_a_session_without_a_call_is_idle_and_has_its_pages() -> None:
    device = VirtualDevice()
    device.open("s", prompt=3 * PAGE, max_tokens=1)
    device.step()
    why = device.scheduler.why("s")
    assert (why.state, why.figures) == ("idle", {"pages": 3})
    assert why.reason == "no call runs on it; 3 of its pages are on the device"
    device.scheduler.truncate("s", 0)
    assert device.scheduler.why("s").reason.endswith("none of its pages are on the device")


def test_a_waiting_session_says_until_when() -> None:
    device = VirtualDevice()
    device.open("s", max_tokens=1)
    device.step()
    device.scheduler.wait("s")
    all_leave(device.scheduler)
    assert (device.scheduler.why("s").state, device.scheduler.why("s").figures) == ("waiting", {"pages": 1})
    device.scheduler.wait("s", device.now + 12.0)
    all_leave(device.scheduler)
    why = device.scheduler.why("s")
    assert why.figures == {"pages": 1, "back_in_s": 12.0} and "come back in 12.0 s" in why.reason


def test_a_paused_or_held_session_says_how_it_goes_on() -> None:
    device = VirtualDevice()
    session = device.open("s")
    device.step()
    assert session.request is not None
    device.scheduler.hold(session.request.id)
    why = device.scheduler.why("s")
    assert why.state == "held" and "its client has not read" in why.reason
    device.scheduler.hold(session.request.id, "grammar")
    device.scheduler.release(session.request.id)
    why = device.scheduler.why("s")
    assert why.state == "held" and "its format allows" in why.reason
    device.scheduler.pause("s")
    why = device.scheduler.why("s")
    assert why.state == "paused" and "resume it" in why.reason


def test_a_session_without_room_names_the_sessions_before_it_and_its_wait() -> None:
    device = VirtualDevice(max_rows=2, seconds=rising(0.5, 0.0))
    for name, priority in (("b", "batch"), ("a", "agent"), ("i", "interactive"), ("j", "interactive")):
        device.open(name, priority)  # type: ignore[arg-type]
    for _ in range(3):
        device.step()
    why = device.scheduler.why("b")
    assert why.state == "queued" and why.ahead == ["i", "j", "a"]
    assert why.figures == {"waited_s": 1.5, "ahead": 3}
    assert why.reason.startswith("it has had no row for 1.5 s: 3 sessions are served before it, and they leave no room")


def test_a_session_that_would_slow_down_a_higher_class_says_so() -> None:
    device = VirtualDevice(seconds=rising(0.0, 0.03))
    device.open("i", "interactive")
    device.open("b", "batch")
    device.step()
    why = device.scheduler.why("b")
    assert why.ahead == ["i"] and "one more would hold them up" in why.reason


def test_a_session_without_pages_gives_the_figures() -> None:
    device = VirtualDevice(pages=4)
    device.open("i", "interactive", prompt=3 * PAGE)
    device.step()
    device.open("b", "batch", prompt=2 * PAGE, deadline=device.now + 5.0)
    device.idle(2.0)
    device.step()
    why = device.scheduler.why("b")
    free = device.kv["m"].pool.free
    assert why.ahead == ["i"] and f"it needs 2 more pages, and {free} of 4 are free" in why.reason
    assert why.figures["pages_needed"] == 2 and why.figures["pages_free"] == free and why.figures["pages"] == 4
    assert why.figures["deadline_in_s"] == pytest.approx(5.0 - 2.0 - device.seconds(1), abs=1e-3)


def test_an_arriving_session_says_so() -> None:
    device = VirtualDevice()
    paging: Paging = device.scheduler.queues["m"].residency.paging
    paging.use_host(Tier(bytearray(Tier.table_bytes(8)), 8))
    session = device.open("s", prompt=2 * PAGE, max_tokens=1)
    device.step()
    device.scheduler.wait("s")
    all_leave(device.scheduler)
    for over in copies(paging.moves):
        device.scheduler.queues["m"].over(over)
    assert device.scheduler.why("s").reason.endswith("none of its pages are on the device")
    kv = device.kv["m"]
    overwrite_free_pages(kv)  # no page can be found on the device
    device.ask(session)
    device.scheduler.next_batch()
    why = device.scheduler.why("s")
    assert (why.state, why.figures) == ("arriving", {"pages": 2, "page_bytes": 1 << 20})


def test_only_the_first_of_very_many_sessions_before_it_are_named() -> None:
    device = VirtualDevice(max_rows=1, max_tokens=1)
    for number in range(MOST_AHEAD + 10):
        device.open(f"s{number}")
    last = f"s{MOST_AHEAD + 9}"
    why = device.scheduler.why(last)
    assert len(why.ahead) == MOST_AHEAD and why.ahead[:2] == ["s0", "s1"]


def test_why_changes_nothing() -> None:
    """It does not even change the clocks of tenants that come back."""
    asked, not_asked = (VirtualDevice(max_rows=1) for _ in range(2))
    for device in (asked, not_asked):
        device.open("a", tenant=1)
        device.run(3.0)
        device.open("b", tenant=2)
        for _ in range(200):
            if device is asked:
                device.scheduler.why("b")
            device.step()
    assert asked.batches == not_asked.batches


def test_an_unknown_session_raises() -> None:
    with pytest.raises(SessionNotFound):
        VirtualDevice().scheduler.why("ghost")
