from __future__ import annotations

import math

import pytest

from djinn_client.errors import OutOfMemory, PromptTooLong
from djinnd.core.batch import Row
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.model_queue import ModelQueue
from djinnd.scheduler.policy import DEFAULT
from djinnd.scheduler.tuning import EVICTION
from djinnd.scheduler.turns.device_quotas import DeviceQuotas
from djinnd.scheduler.turns.shares import Shares
from tests.support.copies import copies
from tests.support.departures import all_leave
from tests.support.overwritten import overwrite_free_pages

PAGE = 4  # tokens


def queue_over(paging: Paging) -> ModelQueue:
    return ModelQueue("m", paging, paging.kv.max_context, 6, Shares(), DeviceQuotas(), DEFAULT)


def queue_of(pages: int, max_context: int = 64) -> ModelQueue:
    return queue_over(Paging(KvManager(pages + 1, PAGE, 5 << 19, max_context)))


def add(queue: ModelQueue, name: str, tokens: int, computed: int = 0, active: bool = True) -> Session:
    """A session with the pages that its KV needs. An active one needs one token."""
    session = Session(name, "m", 1000, "interactive", tokens=[7] * tokens, computed=computed)
    queue.sessions[name] = session
    queue.kv.reserve(name, 1000, computed)
    if active:
        session.request = Request(id=len(queue.sessions), first=0, prompt_end=tokens, max_tokens=8)
        queue.join(session)
    return session


def compose(queue: ModelQueue, step: int = 1, max_tokens: int = 64, max_rows: int = 16) -> list[tuple[str, int, int]]:
    """(session, start, count) of each row. Checks the queue's integrity afterwards."""
    rows = queue.batch_builder.compose(step, max_tokens, max_rows)
    queue.check_integrity()
    return [(row.session.id, row.start, row.count) for row in rows]


def test_rows_of_one_token_come_first_each_kind_in_order_of_arrival() -> None:
    queue = queue_of(pages=16)
    add(queue, "prompt-1", 6)
    add(queue, "decode-1", 9, computed=8)
    add(queue, "prompt-2", 5)
    add(queue, "decode-2", 3, computed=2)
    assert compose(queue) == [("decode-1", 8, 1), ("decode-2", 2, 1), ("prompt-1", 0, 6), ("prompt-2", 0, 5)]


def test_a_row_says_what_the_step_has_to_do() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 10, computed=4)
    (row,) = queue.batch_builder.compose(step=3, max_tokens=64, max_rows=4)
    assert session.request and session.request.state is RequestState.RUNNING
    assert row == Row(session, session.request, start=4, count=6, first_block=0, last_block=6, samples=True)
    assert session.touched == 3


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 10)
    (row,) = queue.batch_builder.compose(step=1, max_tokens=6, max_rows=4)
    assert (row.end, row.samples) == (6, False)
    session.computed = 6
    (row,) = queue.batch_builder.compose(step=2, max_tokens=6, max_rows=4)
    assert (row.end, row.samples) == (10, True)


def test_a_forward_pass_never_samples() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 3)
    session.request = Request(id=1, first=0, prompt_end=3, max_tokens=0, logits=True, seen_from=0)
    (row,) = queue.batch_builder.compose(step=1, max_tokens=6, max_rows=4)
    assert (row.end, row.samples) == (3, False)


def test_a_prompt_has_all_its_pages_before_its_first_chunk() -> None:
    queue = queue_of(pages=8)
    add(queue, "a", 30)
    assert compose(queue, max_tokens=4) == [("a", 0, 4)]
    assert queue.kv.pages_held("a") == 8


def test_idle_sessions_are_evicted_least_recently_used_first() -> None:
    queue = queue_of(pages=6)
    late = add(queue, "late", 8, computed=8, active=False)
    early = add(queue, "early", 8, computed=8, active=False)
    late.touched, early.touched = 5, 4
    add(queue, "a", 12)
    assert compose(queue) == [("a", 0, 12)]
    assert (early.computed, queue.kv.pages_held("early")) == (0, 0)
    assert (late.computed, queue.kv.pages_held("late")) == (8, 2)
    assert early.tokens == [7] * 8


def test_held_sessions_are_evicted_even_for_later_ones() -> None:
    queue = queue_of(pages=4)
    held = add(queue, "held", 9, computed=8)
    assert held.request
    held.request.move("hold")
    queue.hold(held)
    add(queue, "a", 16)
    assert compose(queue) == [("a", 0, 16)]
    assert (held.computed, queue.kv.pages_held("held")) == (0, 0)


def test_the_last_to_arrive_is_evicted_for_the_first_and_is_recomputed_later() -> None:
    queue = queue_of(pages=4)
    add(queue, "first", 9, computed=8)  # needs a third page
    second = add(queue, "second", 4, computed=3)
    third = add(queue, "third", 3, computed=2)
    assert compose(queue) == [("first", 8, 1), ("second", 3, 1)]
    assert third.computed == 0 and second.computed == 3


def test_no_session_is_evicted_for_a_later_one() -> None:
    queue = queue_of(pages=4)
    first = add(queue, "first", 8, computed=7)
    second = add(queue, "second", 9, computed=8)  # needs a third page; the first holds the others
    assert compose(queue) == [("first", 7, 1)]
    assert (first.computed, second.computed) == (7, 8)


def test_no_session_is_evicted_in_vain() -> None:
    queue = queue_of(pages=4)
    add(queue, "first", 8, computed=7)
    idle = add(queue, "idle", 4, computed=4, active=False)
    add(queue, "second", 16)
    assert compose(queue) == [("first", 7, 1)]
    assert idle.computed == 4


def test_a_session_that_waits_for_pages_keeps_later_ones_from_starting() -> None:
    queue = queue_of(pages=4)
    add(queue, "first", 8, computed=7)
    add(queue, "large", 12)
    add(queue, "small", 4)
    assert compose(queue) == [("first", 7, 1)]


def test_a_session_that_waits_for_pages_does_not_stop_later_ones_that_hold_some() -> None:
    queue = queue_of(pages=4)
    add(queue, "first", 9, computed=8)
    add(queue, "large", 16)
    add(queue, "decodes", 4, computed=3)
    assert compose(queue) == [("first", 8, 1), ("decodes", 3, 1)]


def test_a_request_that_ends_leaves_no_page_without_kv_behind() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 30)
    compose(queue, max_tokens=5)
    session.computed, session.request = 5, None
    queue.leave(session)
    assert queue.kv.pages_held("a") == 2
    queue.check_integrity()


def test_a_released_session_joins_the_line_as_the_last() -> None:
    queue = queue_of(pages=8)
    first = add(queue, "first", 3, computed=2)
    add(queue, "second", 3, computed=2)
    queue.hold(first)
    queue.release(first)
    assert compose(queue) == [("second", 2, 1), ("first", 2, 1)]


def test_a_prompt_longer_than_the_model_is_refused_with_the_figures() -> None:
    queue = queue_of(pages=100, max_context=64)
    queue.check_fits(1000, 64)
    with pytest.raises(PromptTooLong, match="would have 65 tokens, m takes 64") as caught:
        queue.check_fits(1000, 65)
    assert caught.value.data == {"tokens": 65, "max_context": 64}


def test_a_session_that_no_pool_could_hold_is_refused_with_the_figures() -> None:
    queue = queue_of(pages=3)
    queue.check_fits(1000, 12)
    with pytest.raises(OutOfMemory, match=r"needs 4 pages of 2.5 MiB for 13 tokens, the pool of m has 3") as caught:
        queue.check_fits(1000, 13)
    assert caught.value.data == {"pages": 4, "capacity": 3, "page_bytes": 5 << 19}


def test_the_audit_finds_kv_without_pages() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 9, computed=4)
    session.computed = 8
    with pytest.raises(AssertionError, match="session a holds 1 pages, 8 of 9 tokens computed"):
        queue.check_integrity()


def test_the_audit_finds_an_idle_session_with_pages_without_kv() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 9, computed=9, active=False)
    session.computed = 4
    with pytest.raises(AssertionError, match="idle session a holds 3 pages for 4 tokens"):
        queue.check_integrity()


def test_the_audit_finds_pages_of_a_session_that_is_gone() -> None:
    queue = queue_of(pages=8)
    queue.kv.reserve("ghost", 1000, 4)
    with pytest.raises(AssertionError, match=r"'ghost'.* hold pages of m"):
        queue.check_integrity()


def test_the_audit_finds_a_request_that_is_neither_active_nor_held() -> None:
    queue = queue_of(pages=8)
    session = add(queue, "a", 3)
    del queue.active[session.id]
    with pytest.raises(AssertionError, match=r"active sessions of m differ: \['a'\]"):
        queue.check_integrity()


def test_vacating_evicts_idle_sessions_then_held_ones_then_the_last_in_line() -> None:
    queue = queue_of(pages=12)
    first, last = add(queue, "first", 9, computed=8), add(queue, "last", 9, computed=8)
    held = add(queue, "held", 9, computed=8)
    assert held.request is not None
    held.request.move("start")
    held.request.move("hold")
    queue.hold(held)
    late, early = add(queue, "late", 8, computed=8, active=False), add(queue, "early", 8, computed=8, active=False)
    late.touched, early.touched = 7, 3
    assert queue.kv.pool.used == 10
    order = [early, late, held, last, first]
    for count, pages in enumerate((8, 6, 4, 2, 0), 1):
        queue.vacate(pages)
        queue.check_integrity()
        assert queue.kv.pool.used == pages
        assert [session.computed for session in order] == [0] * count + [8] * (5 - count)
    assert all(len(session.tokens) in (8, 9) for session in order)


def test_vacating_evicts_no_session_if_there_is_room() -> None:
    queue = queue_of(pages=12)
    session = add(queue, "a", 9, computed=8)
    queue.vacate(2)
    assert session.computed == 8 and queue.kv.pages_held("a") == 2


def test_the_reach_is_that_of_the_longest_session_and_within_the_limit() -> None:
    queue = queue_of(pages=10, max_context=64)
    assert queue.reach == 0
    add(queue, "idle", 20, active=False)
    assert queue.reach == 20
    busy = add(queue, "busy", 15)
    assert queue.reach == 15 + 8
    assert busy.request is not None
    busy.request.max_tokens = 1 << 31
    assert queue.reach == queue.limit == 40


# --- forks ----------------------------------------------------------------------------------------------------------


def fork(queue: ModelQueue, parent: Session, name: str) -> Session:
    child = Session(name, "m", 1000, "interactive", list(parent.tokens), touched=parent.touched)
    queue.sessions[name] = child
    child.computed, _ = queue.kv.fork(parent.id, name, 1000, parent.computed)
    return child


def test_room_counts_pages_that_eviction_frees_and_not_pages_that_victims_held() -> None:
    """Two forks share three full pages and have one page each. Only evicting both makes room for four more."""
    queue = queue_of(pages=6)
    parent = add(queue, "parent", 13, computed=13, active=False)
    child = fork(queue, parent, "child")
    add(queue, "big", 16)
    assert queue.kv.pool.free == 1
    assert compose(queue) == [("big", 0, 16)]
    assert (parent.computed, child.computed) == (0, 0)


def test_a_session_with_only_shared_pages_is_not_evicted_in_vain() -> None:
    queue = queue_of(pages=6)
    runs = add(queue, "runs", 9, computed=8)
    runs.request, request = None, runs.request
    child = fork(queue, runs, "child")
    runs.request = request
    idle = add(queue, "idle", 8, computed=8, active=False)
    idle.touched = 5
    add(queue, "new", 8)
    assert compose(queue) == [("runs", 8, 1), ("new", 0, 8)]
    assert (child.computed, idle.computed) == (8, 0)


def test_no_session_is_evicted_if_all_together_free_too_little() -> None:
    queue = queue_of(pages=4)
    first = add(queue, "first", 13, computed=12)
    first.request, request = None, first.request
    child = fork(queue, first, "child")
    first.request = request
    add(queue, "new", 8)
    assert compose(queue) == [("first", 12, 1)]
    assert child.computed == 12


# --- expected sessions ------------------------------------------------------------------------------------------------


def test_a_session_woken_while_its_pages_are_being_sealed_comes_back_after_that() -> None:
    kv = KvManager(9, PAGE, 5 << 19, 64)
    paging = Paging(kv)
    paging.use_host(Tier(bytearray(Tier.table_bytes(8)), 8))
    queue = queue_over(paging)
    session = add(queue, "s", PAGE + 1, computed=PAGE + 1, active=False)
    queue.wait(session)
    all_leave(queue.residency)
    moves = paging.moves.take(paging.moves.waiting)
    for move in moves:
        queue.over(paging.moves.landed(move))
    assert session.computed == 0
    queue.wake(session)
    assert queue.awaited and not queue.residency.is_arriving(session)
    for move in moves:
        queue.over(paging.moves.sealed(move, 0))
    assert not queue.awaited and queue.residency.is_arriving(session)
    for move in paging.moves.take(paging.moves.waiting):
        queue.over(paging.moves.landed(move))
    assert session.computed == PAGE + 1
    queue.check_integrity()


def test_a_session_gets_pages_that_were_on_their_way_for_a_closed_session() -> None:
    kv = KvManager(9, PAGE, 5 << 19, 64)
    paging = Paging(kv)
    paging.use_host(Tier(bytearray(Tier.table_bytes(8)), 8))
    queue = queue_over(paging)
    first, second = (add(queue, name, PAGE + 1, computed=PAGE + 1, active=False) for name in ("first", "second"))
    for session in (first, second):
        queue.pause(session)
    for over in copies(paging.moves):
        queue.over(over)
    queue.resume(first)
    queue.resume(second)
    assert queue.residency.is_arriving(first) and list(queue.awaited) == ["second"]
    queue.pause(first)
    assert not paging.is_busy and not queue.residency.is_arriving(second)
    queue.tend(1.0)
    all_leave(queue.residency)
    assert queue.residency.is_arriving(second) and not queue.awaited
    queue.check_integrity()


def test_a_session_that_waits_leaves_when_its_request_ends() -> None:
    kv = KvManager(9, PAGE, 5 << 19, 64)
    paging = Paging(kv)
    paging.use_host(Tier(bytearray(Tier.table_bytes(8)), 8))
    queue = queue_over(paging)
    session = add(queue, "s", PAGE + 1, computed=PAGE)
    queue.wait(session)
    all_leave(queue.residency)
    assert not paging.is_busy
    session.request = None
    queue.leave(session)
    all_leave(queue.residency)
    assert paging.is_busy and queue.residency.is_leaving(session)


# --- waiting sessions leave as the host has room ----------------------------------------------------------------------


def test_waiting_sessions_leave_one_at_each_call_of_depart() -> None:
    queue = with_host(pages=10, host=10)
    sessions = [idle(queue, name, 2) for name in ("first", "second")]
    for session in sessions:
        queue.wait(session)
    assert not queue.residency.paging.is_busy
    for more, session in zip((True, False), sessions, strict=True):
        assert not queue.residency.is_leaving(session)
        assert queue.residency.depart() is more
        assert queue.residency.is_leaving(session)
    assert not queue.residency.depart(), "no session is marked to leave"
    copy_all(queue)
    assert not any(queue.kv.pages_held(session.id) for session in sessions)


@pytest.mark.parametrize("how", ["wakes", "asks", "is gone", "goes on after a pause"])
def test_a_session_that_is_needed_again_before_it_leaves_stays(how: str) -> None:
    queue = with_host(pages=10, host=10)
    session = idle(queue, "s", 2)
    queue.wait(session)
    if how == "wakes":
        queue.wake(session)
    elif how == "asks":
        session.request = Request(1, 8, 9, 1)
        session.tokens.append(1)
        queue.join(session)
    elif how == "is gone":
        queue.residency.close(session)
        del queue.sessions["s"]
    else:
        queue.pause(session)
        queue.resume(session)
        copy_all(queue)
    pages = queue.kv.pages_held("s")
    assert not queue.residency.depart()
    assert not queue.residency.is_leaving(session) and queue.kv.pages_held("s") == pages
    copy_all(queue)


def test_the_audit_finds_a_closed_session_that_is_marked_to_leave() -> None:
    queue = with_host(pages=10, host=10)
    queue.wait(idle(queue, "s", 2))
    del queue.sessions["s"]
    queue.kv.drop("s")
    with pytest.raises(AssertionError, match="to leave the device and are no sessions"):
        queue.check_integrity()


def with_host(pages: int, host: int) -> ModelQueue:
    kv = KvManager(pages + 1, PAGE, 5 << 19, 64)
    paging = Paging(kv)
    paging.use_host(Tier(bytearray(Tier.table_bytes(host)), host))
    return queue_over(paging)


def idle(queue: ModelQueue, name: str, pages: int) -> Session:
    """An idle session with tokens of its own."""
    session = add(queue, name, pages * PAGE, computed=pages * PAGE, active=False)
    session.tokens[:] = [len(queue.sessions)] * len(session.tokens)
    queue.kv.publish(name, session.tenant, session.names, session.computed)
    return session


def waiting(queue: ModelQueue, name: str, pages: int) -> Session:
    session = idle(queue, name, pages)
    queue.wait(session)
    all_leave(queue.residency)
    return session


def copy_all(queue: ModelQueue) -> None:
    for over in copies(queue.residency.paging.moves):
        queue.over(over)
    queue.check_integrity()


def test_a_waiting_session_leaves_once_the_host_has_room_and_pages_are_scarce() -> None:
    queue = with_host(pages=10, host=4)
    first, second = waiting(queue, "first", 4), waiting(queue, "second", 4)
    copy_all(queue)
    assert (first.computed, second.computed) == (0, 16)
    add(queue, "third", 6 * PAGE + 1, computed=6 * PAGE)
    queue.tend(1.0)
    all_leave(queue.residency)
    assert not queue.residency.paging.is_busy, "no page is free, and there is no room either"
    host = queue.residency.paging.host
    assert host is not None
    for slot in range(4):
        host.spare([slot])
    queue.tend(2.0)
    all_leave(queue.residency)
    copy_all(queue)
    assert second.computed == 0 and queue.kv.pool.free == 4


def test_a_waiting_session_stays_while_pages_are_free() -> None:
    queue = with_host(pages=10, host=4)
    waiting(queue, "first", 4)
    second = waiting(queue, "second", 4)
    copy_all(queue)
    for slot in range(4):
        queue.residency.paging.host.spare([slot])  # type: ignore[union-attr]
    queue.tend(1.0)
    all_leave(queue.residency)
    assert second.computed == 16 and not queue.residency.paging.is_busy


def test_only_as_many_waiting_sessions_leave_as_needed() -> None:
    """The first one leaves at once, because the host has its pages already."""
    queue = with_host(pages=8, host=8)
    first, second = waiting(queue, "first", 4), waiting(queue, "second", 4)
    for session in (first, second):
        queue.residency.stay(session)
    copy_all(queue)
    assert (queue.kv.pool.free, first.computed, second.computed) == (0, 16, 16)
    queue.tend(1.0)
    all_leave(queue.residency)
    assert (first.computed, second.computed) == (0, 16)


def test_a_quiet_session_without_room_on_the_host_is_tried_again_later() -> None:
    queue = with_host(pages=10, host=4)
    waiting(queue, "first", 4)
    copy_all(queue)
    quiet = add(queue, "quiet", 4, computed=4, active=False)
    for now in (0.0, EVICTION.quiet_s):
        queue.tend(now)
        all_leave(queue.residency)
        assert quiet.computed == 4 and quiet.quiet_since == now
    for slot in range(4):
        queue.residency.paging.host.spare([slot])  # type: ignore[union-attr]
    queue.tend(EVICTION.quiet_s + 1.0)
    all_leave(queue.residency)
    assert not queue.residency.is_moving(quiet)
    queue.tend(2 * EVICTION.quiet_s)
    all_leave(queue.residency)
    copy_all(queue)
    assert quiet.computed == 0


def test_a_pause_moves_the_pages_even_if_the_host_loses_others() -> None:
    queue = with_host(pages=10, host=4)
    waiting(queue, "first", 4)
    copy_all(queue)
    paused = add(queue, "paused", 4, computed=4, active=False)
    queue.pause(paused)
    copy_all(queue)
    assert paused.computed == 0


def test_a_resumed_session_comes_back_at_low_priority_until_a_call() -> None:
    queue = with_host(pages=10, host=8)
    paused = add(queue, "paused", 8, computed=8, active=False)
    queue.pause(paused)
    copy_all(queue)
    overwrite_free_pages(queue.kv)  # no page can be found on the device
    queue.resume(paused)
    moves = list(queue.residency.paging.moves.arriving.values())
    assert len(moves) == 2 and not any(move.is_urgent for move in moves)
    queue.wake(paused)
    assert all(move.is_urgent for move in moves)
    copy_all(queue)
    assert paused.computed == 8


@pytest.mark.parametrize("who", ["called", "asked", "neither"])
def test_a_session_that_waits_for_room_makes_all_moves_urgent(who: str) -> None:
    """This includes pages that leave for another reason, of a session that is closed since."""
    queue = with_host(pages=6, host=16)
    session = add(queue, "s", 16, computed=16, active=False)
    queue.pause(session)
    copy_all(queue)
    overwrite_free_pages(queue.kv)
    leaving = waiting(queue, "leaving", 3)
    moves = list(queue.residency.paging.moves.filling.values())
    assert len(moves) == 3 and not any(move.is_urgent for move in moves)
    queue.residency.close(leaving)
    del queue.sessions["leaving"]
    assert queue.kv.stranded == 3
    queue.resume(session)
    if who == "called":
        queue.wake(session)
    elif who == "asked":
        session.request = Request(id=1, first=15, prompt_end=16, max_tokens=8)
        session.tokens += [7, 7, 7]
        queue.join(session)
        assert compose(queue) == []
    assert all(move.is_urgent for move in moves) is (who != "neither")


def test_a_session_that_has_called_is_no_longer_expected() -> None:
    queue = with_host(pages=4, host=4)
    session = waiting(queue, "s", 1)
    session.wakes_at = 5.0
    session.tokens += [7]
    session.request = Request(id=1, first=4, prompt_end=5, max_tokens=8)
    queue.join(session)
    assert (session.waits, session.wakes_at) == (False, 0.0)


def test_an_expected_session_that_does_not_call_is_no_longer_expected() -> None:
    queue = with_host(pages=4, host=8)
    away, here = waiting(queue, "away", 4), add(queue, "here", 0, active=False)
    copy_all(queue)
    here.tokens[:], here.computed = [9] * 4 * PAGE, 4 * PAGE
    # nothing is free, and no session is evicted for one that was not asked for
    queue.kv.reserve("here", 1000, 4 * PAGE)
    away.wakes_at = 5.0
    key = queue.residency.lower_tiers.keys(away)[0]
    queue.residency.expect(away, 5.0)
    for now in (5.0, 5.25, 5.25 + EVICTION.crowded_quiet_s):
        queue.tend(now)
        all_leave(queue.residency)
        assert (away.waits, away.called, away.computed) == (False, True, 0)
        assert queue.residency.lower_tiers.left.wanted_at(key) == 5.0
    queue.tend(5.25 + EVICTION.quiet_s)
    all_leave(queue.residency)
    assert not away.called and queue.residency.lower_tiers.left.wanted_at(key) == math.inf


@pytest.mark.parametrize("is_called", [False, True])
def test_a_called_session_stays_longer_than_others_while_pages_are_scarce(is_called: bool) -> None:
    queue = with_host(pages=4, host=8)
    session = add(queue, "s", 4 * PAGE, computed=4 * PAGE, active=False)
    session.called = is_called
    queue.tend(0.0)
    all_leave(queue.residency)
    queue.tend(EVICTION.crowded_quiet_s)
    all_leave(queue.residency)
    copy_all(queue)
    assert (session.computed == 4 * PAGE) == is_called
    queue.tend(EVICTION.quiet_s)
    all_leave(queue.residency)
    copy_all(queue)
    assert session.computed == 0 and not session.called
