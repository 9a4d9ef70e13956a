from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.residency.copy_or_recompute import Costs
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.tuning import EVICTION, STEP
from tests.support.copies import copies
from tests.support.overwritten import overwrite_free_pages

PAGE = 4  # tokens


class Harness:
    """A residency with its pool and host tier. `copy_all` makes all copies that are under way."""

    def __init__(self, pages: int = 8, host: int = 16) -> None:
        self.kv = KvManager(pages + 1, PAGE, 1 << 20, max_context=64)
        self.paging = Paging(self.kv)
        if host:
            self.paging.use_host(Tier(bytearray(Tier.table_bytes(host)), host))
        self.residency = KvResidency(self.paging)

    def session(self, name: str, tokens: int, first: int = 0, *, computed: bool = True) -> Session:
        session = Session(name, "m", 1000, "agent", list(range(first, first + tokens)))
        if computed:
            self.kv.reserve(name, 1000, tokens)
            self.residency.advance(session, tokens)
        return session

    def ask(self, session: Session, prompt: int = 2) -> None:
        """Gives the session a request with a prompt of `prompt` tokens."""
        first = len(session.tokens)
        session.tokens += [99] * prompt
        session.request = Request(1, first, first + prompt, max_tokens=8)

    def departs(self, session: Session) -> bool:
        """Lets an idle session leave if the host has room for its pages. Returns False if it stays."""
        self.residency.leave_soon(session)
        self.residency.depart()
        return self.residency.is_leaving(session) or not session.computed

    def copy_all(self, *, failing: float = 0) -> None:
        for over in copies(self.paging.moves, failing=failing, bad=True):
            self.over(over)

    def over(self, transfers: Iterable) -> None:  # type: ignore[type-arg]
        for transfer in transfers:
            self.residency.over(transfer)
        self.residency.check_integrity()


def gone(harness: Harness, name: str, tokens: int) -> Session:
    session = harness.session(name, tokens)
    harness.residency.leave(session)
    harness.copy_all()
    harness.kv.pool.resize(harness.kv.pool.capacity + 1)  # no page can be found on the device
    overwrite_free_pages(harness.kv)
    return session


def test_a_session_that_leaves_keeps_its_pages_until_they_have_been_copied() -> None:
    harness = Harness()
    session = harness.session("a", 10)
    assert harness.residency.leave(session) is not None
    assert harness.residency.is_leaving(session) and harness.kv.pages_held("a") == 3
    harness.copy_all()
    assert not harness.residency.is_moving(session)
    assert (harness.kv.pages_held("a"), session.computed, session.left_at) == (0, 0, 10)


def test_a_session_whose_pages_are_saved_already_leaves_at_once() -> None:
    harness = Harness()
    session, twin = harness.session("a", 8), harness.session("b", 8)
    harness.residency.leave(session)
    harness.copy_all()
    assert harness.residency.leave(twin) is None and harness.kv.pages_held("b") == 0


def test_a_session_that_is_needed_after_all_stays_with_all_its_pages() -> None:
    harness = Harness()
    session = harness.session("a", 10)
    harness.residency.leave(session)
    harness.residency.stay(session)
    harness.residency.leave(session)
    harness.residency.stay(session)
    harness.copy_all()
    assert (harness.kv.pages_held("a"), session.computed) == (3, 10)


def test_without_tiers_only_evicted_sessions_leave() -> None:
    harness = Harness(host=0)
    session = harness.session("a", 8)
    assert harness.residency.leave(session) is None and session.computed == 8
    assert harness.residency.leave(session, forced=True) is None and session.computed == 0


def test_imported_kv_stays_if_it_could_not_be_saved() -> None:
    harness = Harness(host=1)
    session = harness.session("a", 8)
    session.foreign_tokens = 8
    harness.residency.leave(session)
    harness.copy_all()
    assert session.computed == 8
    harness.residency.leave(session, forced=True)
    harness.copy_all()
    assert session.computed == 0


def test_an_eviction_does_not_wait_for_the_host_to_be_ready() -> None:
    harness = Harness(host=0)
    host = Tier(bytearray(Tier.table_bytes(16)), 16, are_ready=False)
    harness.paging.use_host(host)
    idle, paused, given, hurried = (harness.session(name, 8, first) for first, name in enumerate("ipgh"))
    paused.paused, given.foreign_tokens = True, 8
    assert not harness.departs(idle), "it stays"
    waits = [
        harness.residency.leave(session, forced=session in (given, hurried)) for session in (paused, given, hurried)
    ]
    assert [transfer is not None for transfer in waits] == [True, True, False]
    assert (hurried.computed, hurried.left_at, harness.kv.pages_held("h")) == (0, 8, 0)
    assert len(harness.paging.moves.filling) == 4
    host.make_ready(range(16))
    assert harness.departs(idle)
    harness.copy_all()
    assert not any(harness.kv.pages_held(name) for name in "ipg")


@pytest.mark.parametrize("given", [False, True])
def test_pages_on_disk_are_recomputed_if_the_host_is_not_ready(given: bool) -> None:
    """Such as pages of a session from before a restart, whose model has just been loaded."""
    harness = Harness(host=0)
    session = harness.session("a", 8)
    host, disk = (Tier(bytearray(Tier.table_bytes(8)), 8, are_ready=ready) for ready in (False, True))
    for key in harness.residency.lower_tiers.keys(session):
        slot = disk.prepare(key, 1000)
        assert slot is not None
        disk.complete(slot, 0)
    harness.paging.use_host(host)
    harness.paging.use_disk(disk)
    harness.residency.leave(session, forced=True)
    overwrite_free_pages(harness.kv)
    assert session.computed == 0
    session.foreign_tokens = 8 if given else 0
    harness.ask(session)
    assert harness.residency.secure(session, []) is not given
    assert harness.residency.is_arriving(session) is given
    harness.copy_all()
    assert session.computed == (8 if given else 0)


def test_a_sealed_leave_ends_later_than_an_ordinary_one() -> None:
    harness = Harness()
    session = harness.session("a", 4)
    landing = harness.residency.leave(session)
    sealing = harness.residency.leave(session, sealed=True)
    (move,) = harness.paging.moves.take(9)
    harness.over(harness.paging.moves.landed(move))
    assert landing is not None and landing.is_over
    assert sealing is not None and not sealing.is_over and harness.residency.is_leaving(session)
    harness.over(harness.paging.moves.sealed(move, 0))
    assert sealing.is_over and harness.kv.pages_held("a") == 0


def test_a_session_that_runs_again_waits_only_for_its_own_pages() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.ask(session)
    assert not harness.residency.secure(session, []) and harness.residency.is_arriving(session)
    harness.copy_all()
    assert session.computed == 10 and not harness.residency.is_moving(session)
    assert harness.residency.secure(session, []) and harness.kv.pages_held("a") == 3


def test_pages_that_did_not_come_are_recomputed() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.ask(session)
    harness.residency.secure(session, [])
    harness.copy_all(failing=math.inf)
    assert session.computed == 0 and harness.kv.pages_held("a") == 0
    assert harness.residency.secure(session, []) and not harness.paging.is_busy


def test_only_as_many_of_the_first_candidates_are_evicted_as_needed() -> None:
    harness = Harness(pages=6)
    first, second, third = (harness.session(name, 8, first) for name, first in (("a", 0), ("b", 20), ("c", 40)))
    new = harness.session("d", 0)
    harness.ask(new, prompt=9)
    for _ in range(2):  # the second time, the victims are leaving already
        assert not harness.residency.secure(new, [first, second, third])
        assert [harness.residency.is_leaving(s) for s in (first, second, third)] == [True, True, False]
    harness.copy_all()
    assert harness.residency.secure(new, [third]) and third.computed == 8


def test_a_prefetch_brings_all_of_an_idle_session() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.residency.prefetch(session, [])
    harness.copy_all()
    assert (session.computed, harness.kv.pages_held("a")) == (10, 3)


def test_a_session_that_is_evicted_while_it_arrives_is_found_whole_again() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.residency.prefetch(session, [])
    harness.residency.leave(session)
    assert harness.kv.pages_held("a") == 0 and session.left_at == 10
    harness.copy_all()
    harness.residency.prefetch(session, [])
    harness.copy_all()
    assert session.computed == 10


@pytest.mark.parametrize("way", ["leaves", "is cut", "is closed"])
def test_a_called_off_arrival_frees_its_pages_at_once(way: str) -> None:
    harness = Harness(pages=4)
    session, other = gone(harness, "a", 10), harness.session("b", 12, first=50, computed=False)
    harness.residency.prefetch(session, [])
    assert not harness.residency.secure(other, [])
    match way:
        case "leaves":
            harness.residency.leave(session)
        case "is cut":
            session.truncate(6)
            harness.residency.rewind(session, 0)
        case "is closed":
            harness.residency.close(session)
    assert harness.residency.secure(other, []) and not harness.paging.is_busy
    harness.residency.check_integrity()


def test_a_session_truncated_while_it_arrives_keeps_the_pages_it_had() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.residency.prefetch(session, [])
    session.truncate(6)
    harness.residency.rewind(session, session.computed)
    harness.copy_all()
    assert session.computed == 0 and harness.kv.pool.used == 0


def spare(harness: Harness) -> int:
    """How many pages the host can spare."""
    assert harness.paging.host is not None
    return sum(map(harness.paging.host.is_spare, range(harness.paging.host.capacity)))


def test_the_host_can_spare_pages_that_came_back_until_they_leave_again() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    assert spare(harness) == 0
    harness.residency.prefetch(session, [])
    harness.copy_all()
    assert spare(harness) == 3
    harness.residency.leave(session)
    assert session.computed == 0 and spare(harness) == 0


def test_the_host_can_spare_pages_that_the_device_still_had() -> None:
    harness = Harness()
    session = harness.session("a", 10)
    harness.residency.leave(session)
    harness.copy_all()
    harness.ask(session)
    assert not harness.residency.secure(session, []) and spare(harness) == 2  # the third is on its way
    harness.copy_all()
    assert spare(harness) == 3


def test_the_host_cannot_spare_pages_of_an_arrival_that_was_called_off() -> None:
    harness = Harness()
    session = gone(harness, "a", 10)
    harness.residency.prefetch(session, [])
    harness.residency.leave(session)
    harness.copy_all()
    assert harness.kv.pool.used == 0 and spare(harness) == 0


def test_the_host_cannot_spare_pages_on_the_device_without_room_for_the_rest() -> None:
    harness = Harness(pages=4)
    session = harness.session("a", 10)
    harness.residency.leave(session)
    harness.copy_all()
    harness.session("b", 5, first=50)
    harness.ask(session)
    assert not harness.residency.secure(session, [])
    assert (session.computed, harness.kv.pages_held("a"), spare(harness)) == (0, 0, 0)


def test_the_host_can_spare_pages_of_a_closed_session_that_no_other_has_left() -> None:
    harness = Harness()
    first = harness.session("first", 10)
    second = Session("second", "m", 1000, "agent", first.tokens[:8])
    second.computed, _ = harness.kv.fork("first", "second", 1000, 8, may_copy=True)
    for session in (first, second):
        harness.residency.leave(session)
        harness.copy_all()
    harness.residency.close(first)
    assert spare(harness) == 1  # no other session has the last page
    harness.residency.close(second)
    assert spare(harness) == 3


def test_pages_of_a_closed_session_are_found_and_its_last_ones_are_evicted_first() -> None:
    harness = Harness(host=4)
    assert harness.paging.host is not None
    gone = harness.session("gone", 13)
    harness.residency.leave(gone)
    harness.copy_all()
    keys = harness.residency.lower_tiers.keys(gone)
    harness.residency.close(gone)
    lasting = harness.session("lasting", 8, first=50)
    assert harness.departs(lasting)
    harness.copy_all()
    assert harness.paging.host.lacks(keys) == keys[2:]
    alike = harness.session("alike", 13, computed=False)
    harness.ask(alike)
    harness.kv.resize(9)  # no page can be found on the device
    overwrite_free_pages(harness.kv)
    assert not harness.residency.secure(alike, []) and harness.residency.is_arriving(alike)
    harness.copy_all()
    assert alike.computed == 8


def test_pages_arriving_for_a_closed_session_can_be_spared() -> None:
    harness = Harness()
    session = harness.session("a", 10)
    harness.residency.leave(session)
    harness.copy_all()
    harness.ask(session)
    assert not harness.residency.secure(session, []) and (session.computed, spare(harness)) == (8, 2)
    harness.residency.close(session)
    assert spare(harness) == 3
    harness.copy_all()


def test_pages_of_a_closed_session_that_another_is_leaving_with_are_not_spared() -> None:
    harness = Harness()
    first = harness.session("first", 8)
    harness.residency.leave(first)
    harness.copy_all()
    leaving = harness.session("leaving", 12)
    harness.residency.leave(leaving)
    harness.residency.close(first)
    assert spare(harness) == 0
    harness.copy_all()
    assert harness.residency.leave(leaving) is None and leaving.computed == 0


def test_public_pages_are_not_spared_when_a_session_is_closed() -> None:
    harness = Harness()
    harness.kv.public.mark(range(PAGE), PAGE)
    session = harness.session("a", 2 * PAGE)
    harness.residency.leave(session)
    harness.copy_all()
    harness.residency.close(session)
    assert spare(harness) == 1


def test_leaving_freely_does_not_make_the_host_lose_pages_without_another_copy() -> None:
    harness = Harness(host=4)
    first, second = harness.session("a", 12), harness.session("b", 8, first=50)
    assert harness.departs(first)
    harness.copy_all()
    assert not harness.departs(second) and second.computed == 8
    assert not harness.paging.is_busy
    overwrite_free_pages(harness.kv)
    harness.residency.prefetch(first, [])
    harness.copy_all()
    assert first.computed == 12
    assert harness.departs(second), "at the cost of what is on the device"
    harness.copy_all()
    assert (second.computed, harness.kv.pages_held("b")) == (0, 0)


@pytest.mark.parametrize(
    ("expected", "stays"),
    [
        ((10.0, 12.0, 20.0), ["a", "b"]),  # the pages that would be lost are wanted earlier
        ((10.0, 12.0, 11.0), ["a", "b"]),  # the same: the first session's pages would be lost
        ((10.0, 12.0, 9.0), ["c", "b"]),
        ((0.0, 12.0, 20.0), ["c", "b"]),  # it is unknown when or whether they are wanted
        ((10.0, 12.0, 0.0), ["a", "b"]),  # its own return is unknown too
        ((0.0, 12.0, 0.0), ["c", "b"]),
        ((EVICTION.unknown_s + 1.0, 12.0, 0.0), ["c", "b"]),  # its own return may well be earlier
    ],
)
def test_an_evicted_session_that_is_expected_last_is_recomputed(
    expected: tuple[float, float, float], stays: list[str]
) -> None:
    harness = Harness(host=4)
    a, b, c = (harness.session(name, 8, first) for first, name in enumerate("abc"))
    for session, back_at in zip((a, b, c), expected, strict=True):
        session.waits, session.wakes_at = True, back_at
        harness.residency.leave(session, forced=True)
        harness.copy_all()
        assert harness.kv.pages_held(session.id) == 0
    found = {
        name: harness.paging.count(harness.residency.lower_tiers.keys(session))[0]
        for name, session in zip("abc", (a, b, c), strict=True)
    }
    assert sorted(name for name, pages in found.items() if pages == 2) == sorted(stays)


@pytest.mark.parametrize("shown", ["interactive", "called", "runs"])
def test_interactive_called_and_running_sessions_are_saved_before_expected_ones(shown: str) -> None:
    harness = Harness(host=2)
    first, last = harness.session("a", 8), harness.session("b", 8, 1)
    first.waits, first.wakes_at = True, 10.0
    harness.residency.leave(first, forced=True)
    harness.copy_all()
    if shown == "called":
        last.called = True
    elif shown == "runs":
        harness.ask(last)
    else:
        last.priority = "interactive"
    keys = harness.residency.lower_tiers.keys(last)[:2]
    harness.residency.leave(last, forced=True)
    harness.copy_all()
    assert harness.paging.count(keys)[0] == 2


@pytest.mark.parametrize(("learned", "stays"), [(0.0, ["a", "c"]), (10.0, ["a", "b"])])
def test_an_expected_time_that_is_learned_late_counts_too(learned: float, stays: list[str]) -> None:
    harness = Harness(host=4)
    a, b, c = (harness.session(name, 8, first) for first, name in enumerate("abc"))
    for session, back_at in ((b, 0.0), (a, 5.0), (c, 20.0)):
        if session is c and learned:
            harness.residency.expect(b, learned)
        session.waits, session.wakes_at = True, back_at
        harness.residency.leave(session, forced=True)
        harness.copy_all()
    found = {session.id: harness.paging.count(harness.residency.lower_tiers.keys(session))[0] for session in (a, b, c)}
    assert sorted(name for name, pages in found.items() if pages == 2) == stays


def test_paused_sessions_and_imported_kv_are_saved_before_expected_ones() -> None:
    for given in (False, True):
        harness = Harness(host=2)
        first, last = harness.session("a", 8), harness.session("b", 8, 1)
        for session, back_at in ((first, 10.0), (last, 20.0)):
            session.waits, session.wakes_at = True, back_at
        harness.residency.leave(first, forced=True)
        harness.copy_all()
        last.foreign_tokens = 8 if given else 0
        harness.residency.leave(last, forced=given, sealed=not given)
        harness.copy_all()
        assert harness.paging.count(harness.residency.lower_tiers.keys(last))[0] == 2


def test_an_evicted_session_is_recomputed_without_a_host() -> None:
    harness = Harness(host=0)
    session = harness.session("a", 8)
    assert not harness.departs(session) and session.computed == 8


def test_keys_of_a_session_that_has_left_are_those_from_when_it_left() -> None:
    harness = Harness()
    session = harness.session("a", 10)
    before = harness.residency.lower_tiers.keys(session)
    harness.residency.leave(session)
    harness.copy_all()
    session.tokens += [1, 2, 3]
    assert harness.residency.lower_tiers.keys(session) == before
    session.truncate(4)
    harness.residency.rewind(session, 0)
    assert harness.residency.lower_tiers.keys(session) == before[:1]


@pytest.mark.parametrize(
    ("costs", "on_disk", "copies"),
    [
        (Costs(), 0, True),
        (Costs(bus=100.0, prefill=100.0), 0, True),  # 2 s against 3 s
        (Costs(bus=100.0, prefill=1000.0), 0, False),  # 2 s against 0.3 s
        (Costs(bus=100.0, prefill=100.0), 1, True),  # the speed of the disk is unknown
        (Costs(bus=100.0, disk=50.0, prefill=100.0), 1, False),  # 2 s and 2 s more
        (Costs(bus=100.0, disk=200.0, prefill=100.0), 1, True),
    ],
)
def test_pages_are_copied_if_that_takes_less_time(costs: Costs, on_disk: int, copies: bool) -> None:
    found = Found(start=0, tokens=300, keys=(b"a", b"b"), on_disk=on_disk)
    assert costs.prefer_copy(found, computed=0, beside=1, page_bytes=100) is copies


@pytest.mark.parametrize(
    ("beside", "copies"),
    [
        (0, True),  # idle: bringing it back now delays no step
        (1, True),  # one second against that of a prefill, instead of decoding one token
        (STEP.least_chunk - 3, False),  # free: the step takes as long without them
        (STEP.least_chunk, False),  # 3 tokens more in a prefill
    ],
)
def test_a_few_tokens_take_as_long_as_a_prefill_unless_there_is_one_anyway(beside: int, copies: bool) -> None:
    costs = Costs(bus=100.0, prefill=float(STEP.least_chunk))
    found = Found(start=16, tokens=19, keys=(b"a",))
    assert costs.prefer_copy(found, computed=16, beside=beside, page_bytes=100) is copies


def test_looking_up_pages_of_an_earlier_engine_does_not_prevent_finding_them() -> None:
    harness = Harness()
    session = gone(harness, "s", 9)
    session.left_at = 0  # this engine does not know where it ended
    harness.residency.forget(session)
    assert len(harness.residency.lower_tiers.keys(session)) == 3
    harness.ask(session)
    assert not harness.residency.secure(session, ()) and harness.residency.is_arriving(session)
    harness.copy_all()
    assert session.computed == 9


@pytest.mark.parametrize("first", [9, 8, 5, 4, 0])
def test_pages_before_a_change_are_found_again_after_leaving(first: int) -> None:
    """This includes a part of a page, because imported KV cannot be recomputed."""
    harness = Harness()
    session = gone(harness, "a", 10)
    session.foreign_tokens = first
    harness.residency.revise(session, first)
    session.tokens[first:] = [77] * (10 - first)
    harness.ask(session)
    assert harness.residency.secure(session, ()) == (first == 0)
    harness.copy_all()
    assert session.computed == first
    harness.residency.revise(session, 2)
    assert session.computed == min(first, 2)
    harness.residency.check_integrity()


@pytest.mark.parametrize("length", [9, 8, 5, 1])
@pytest.mark.parametrize("then", ["it is paused", "its next request is cancelled", "a request is rolled back"])
def test_pages_of_a_truncated_session_are_found_again_by_any_request(length: int, then: str) -> None:
    """The last page keeps the key with which it left, which covers more tokens than are left."""
    harness = Harness()
    session = gone(harness, "a", 10)
    session.foreign_tokens = 10
    if then == "a request is rolled back":
        harness.ask(session)
        session.truncate(length)
        harness.residency.rewind(session, session.computed)
    else:
        session.truncate(length)
        harness.residency.revise(session, length)
    if then == "it is paused":
        assert harness.residency.leave(session, sealed=True) is None
    else:
        harness.ask(session)
        harness.residency.rewind(session, session.computed)
    session.tokens[length:] = [77] * (10 - length)
    harness.ask(session)
    assert not harness.residency.secure(session, ())
    harness.copy_all()
    assert session.computed == length
    harness.residency.check_integrity()


def test_keys_differ_from_the_first_edited_position_on() -> None:
    harness = Harness()
    plain, edited = harness.session("a", 10), harness.session("b", 10, computed=False)
    edited.edits = (Edit(1, (Point("resid", 1),), "scale", (Extent(6),)),)
    harness.ask(edited)
    assert harness.residency.secure(edited, ()) and edited.computed == 4
    harness.residency.advance(edited, 12)
    ours, theirs = harness.residency.lower_tiers.keys(plain), harness.residency.lower_tiers.keys(edited)
    assert ours[0] == theirs[0] and not set(ours[1:]) & set(theirs)
    harness.residency.leave(edited)
    harness.copy_all()
    assert harness.residency.lower_tiers.keys(edited) == theirs


def test_pages_with_more_kv_than_may_be_used_are_given_up() -> None:
    """The request for activations came while they were on their way."""
    harness = Harness()
    session = gone(harness, "a", 10)
    assert harness.residency.prefetch(session, ()) and harness.residency.is_arriving(session)
    harness.ask(session)
    assert session.request is not None
    session.request.seen_from = 6
    harness.copy_all()
    assert session.computed == 6


# --- urgency ----------------------------------------------------------------------------------------------------------


def urgent(harness: Harness) -> list[bool]:
    """For each waiting move, whether it is urgent."""
    moves = harness.paging.moves
    return [move.is_urgent for move in moves.take(moves.waiting)]


@pytest.mark.parametrize("why", ["neither", "a call", "called", "a call later"])
def test_arrivals_are_urgent_for_a_call_and_for_a_called_session(why: str) -> None:
    harness = Harness()
    session = gone(harness, "a", 8)
    if why == "a call":
        harness.ask(session)
        assert not harness.residency.secure(session, [])
    else:
        session.called = why == "called"
        assert harness.residency.prefetch(session, [])
    if why == "a call later":
        harness.residency.hurry(session)
    assert urgent(harness) == [why != "neither"] * 2
