"""Sessions that stop inside the model: which blocks run for which positions, and which events drop a session's
stage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from djinn_client.protocol import Class
from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Batch, blocks_of
from djinnd.core.edits import FOREVER, Edit, Extent
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage, Stop
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Direction
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.residency.copy_or_recompute import Costs
from djinnd.scheduler.scheduler import Scheduler
from tests.support.departures import all_leave
from tests.support.virtual import UNLIMITED, measured, rising

PAGE = 4  # tokens
BLOCKS = 6
RowOf = tuple[str, int, int, int, int, bool]  # session, tokens [start, end), blocks [first, last), samples


class Harness:
    """A scheduler with one model that always generates the token 7."""

    def __init__(self, pages: int = 32, max_tokens: int = 64, paging: bool = False) -> None:
        self.kv = KvManager(pages + 1, PAGE, 1, max_context=256)
        self.scheduler = Scheduler(max_tokens, max_rows=16, policy=UNLIMITED)
        tiers = Paging(self.kv)
        if paging:
            tiers.use_host(Tier(bytearray(Tier.table_bytes(64)), 64))
        self.scheduler.add_model("m", self.kv, 256, BLOCKS, tiers)
        self._ids = iter(range(1, 1000))

    def open(self, name: str, priority: Class = "interactive") -> Session:
        session = Session(name, "m", 1000, priority)
        self.scheduler.open(session)
        return session

    def ask(
        self,
        session: Session,
        prompt: int = 0,
        max_tokens: int = 1,
        stops: Sequence[tuple[int, int]] = (),
        resume_block: int | None = None,
    ) -> Request:
        """`stops`: block and first position. The caller leaves out those that have stopped already, as the server
        does."""
        first = len(session.tokens)
        request = Request(next(self._ids), first, first + prompt, max_tokens, resume_block=resume_block)
        passed = -1 if resume_block is None else resume_block
        request.stops = tuple(Stop(block, at if block > passed else max(at, first)) for block, at in stops)
        self.scheduler.submit(session.id, request, [next(self._ids) for _ in range(prompt)])
        return request

    def compose(self) -> Batch:
        batch = self.scheduler.next_batch()
        assert batch is not None
        self.scheduler.check_integrity()
        return batch

    def step(self) -> list[RowOf]:
        batch = self.compose()
        self.scheduler.complete(batch, [7] * sum(row.samples for row in batch.rows))
        self.scheduler.check_integrity()
        return [
            (row.session.id, row.start, row.end, row.first_block, row.last_block, row.samples) for row in batch.rows
        ]

    def copy(self) -> None:
        """Lets marked sessions leave, and makes all copies."""
        all_leave(self.scheduler)
        moves = self.scheduler.queues["m"].residency.paging.moves
        while moves.waiting:
            (move,) = moves.take(1)
            over = moves.landed(move)
            if move.direction is Direction.DEMOTE:
                over += moves.sealed(move, 7)
            self.scheduler.queues["m"].over(over)
            self.scheduler.check_integrity()

    def parked(self, block: int = 2, prompt: int = 10, stops_from: int = 0) -> Session:
        """A session with its prompt parked before `block`."""
        session = self.open("a")
        request = self.ask(session, prompt, stops=[(block, stops_from)])
        while not request.stopped:
            self.step()
        return session


def test_a_prompt_stops_and_goes_on_through_the_later_blocks() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.ask(session, 10, max_tokens=2, stops=[(2, 0)])
    assert harness.step() == [("a", 0, 10, 0, 2, False)]
    assert (request.finish_reason, request.stopped) == ("breakpoint", Stop(2, 0))
    assert session.stage is not None and (session.stage.first, session.stage.done, session.computed) == (2, 0, 0)
    assert harness.kv.pages_held("a") == 3
    harness.ask(session, max_tokens=2, resume_block=2)
    assert harness.step() == [("a", 0, 10, 2, BLOCKS, True)]
    assert session.stage is None and session.computed == 10
    assert harness.step() == [("a", 10, 11, 0, BLOCKS, True)]
    assert session.request is None


def test_a_prompt_stops_at_several_blocks_and_behind_the_last() -> None:
    harness = Harness()
    session, stops = harness.open("a"), [(block, 0) for block in (0, 4, BLOCKS)]
    harness.ask(session, 10, stops=stops)
    assert harness.step() == [("a", 0, 10, 0, 0, False)]
    stage = session.stage
    for first, last in ((0, 4), (4, BLOCKS)):
        harness.ask(session, stops=stops, resume_block=first)
        assert harness.step() == [("a", 0, 10, first, last, False)]
        assert session.stage is stage, "one object, by which what is held is known"
    harness.ask(session, stops=stops, resume_block=BLOCKS)
    assert harness.step() == [("a", 0, 10, BLOCKS, BLOCKS, True)]
    assert session.computed == 10


def test_each_generated_token_stops() -> None:
    harness = Harness()
    session = harness.open("a")
    stops = [(3, 10)]
    harness.ask(session, 10, max_tokens=4, stops=stops)
    assert harness.step() == [("a", 0, 10, 0, BLOCKS, True)]
    assert harness.step() == [("a", 10, 11, 0, 3, False)]
    harness.ask(session, max_tokens=3, stops=stops, resume_block=3)
    assert harness.step() == [("a", 10, 11, 3, BLOCKS, True)]
    assert harness.step() == [("a", 11, 12, 0, 3, False)]
    assert len(session.tokens) == 12


def test_positions_before_the_first_named_one_pass_all_blocks() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.ask(session, 10, stops=[(3, 6)])
    assert harness.step() == [("a", 0, 6, 0, BLOCKS, False)]
    assert harness.step() == [("a", 6, 10, 0, 3, False)]
    assert session.computed == 6
    harness.ask(session, stops=[(5, 8)], resume_block=3)
    assert harness.step() == [("a", 6, 8, 3, BLOCKS, False)]
    assert session.computed == 8
    assert harness.step() == [("a", 8, 10, 3, 5, False)]
    harness.ask(session, resume_block=5)
    assert harness.step() == [("a", 8, 10, 5, BLOCKS, True)]


def test_chunks_of_a_stage_advance_the_stage_and_not_the_session() -> None:
    harness = Harness(max_tokens=4)
    session = harness.open("a")
    request = harness.ask(session, 10, stops=[(2, 0)])
    assert harness.step() == [("a", 0, 4, 0, 2, False)]
    assert session.stage is not None and (session.stage.done, session.computed, session.remaining) == (4, 0, 6)
    assert harness.step() + harness.step() == [("a", 4, 8, 0, 2, False), ("a", 8, 10, 0, 2, False)]
    assert request.stopped
    harness.ask(session, resume_block=2)
    assert harness.step() == [("a", 0, 4, 2, BLOCKS, False)]
    assert (session.stage.done, session.computed) == (4, 4), "what goes to the end has its KV at once"


def test_a_lost_stage_is_run_again_and_stops_at_the_same_block() -> None:
    harness = Harness()
    session, stops = harness.parked(), [(1, 0), (2, 0), (4, 0)]
    harness.scheduler.drop_stage("a")
    harness.scheduler.check_integrity()
    assert session.stage is None and harness.kv.pages_held("a") == 0
    harness.ask(session, stops=stops, resume_block=2)
    assert harness.step() == [("a", 0, 10, 0, 4, False)]


def test_a_stage_lost_while_its_step_runs_is_run_again() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.ask(session, 10, stops=[(2, 0)])
    batch = harness.compose()
    harness.scheduler.drop_stage("a")
    assert harness.scheduler.complete(batch, []) == [] and session.computed == 0
    assert harness.step() == [("a", 0, 10, 0, 2, False)]
    harness.ask(session, resume_block=2)
    batch = harness.compose()
    harness.scheduler.drop_stage("a")
    assert harness.scheduler.complete(batch, [7]) == [] and (session.computed, len(session.tokens)) == (0, 10)
    harness.scheduler.check_integrity()


def test_a_call_without_resume_runs_stopped_positions_from_the_first_block() -> None:
    harness = Harness()
    session = harness.parked(stops_from=4)
    assert session.computed == 4
    harness.ask(session, 2)
    assert session.stage is None
    assert harness.step() == [("a", 4, 12, 0, BLOCKS, True)]


@pytest.mark.parametrize(
    ("point", "position", "keeps"),
    [
        (Point("resid", 2), 4, True),
        (Point("attn", 2), FOREVER, True),
        (Point("logits"), 9, True),
        (Point("resid", 0), 20, True),  # at a position that is not there yet
        (Point("resid", 1), 9, False),
        (Point("resid", 2), 3, False),  # the positions that wait depend on it
    ],
)
def test_edits_ahead_of_waiting_positions_keep_the_stage(point: Point, position: int, keeps: bool) -> None:
    harness = Harness()
    session = harness.parked(stops_from=4)
    extent = Extent(9) if position == FOREVER else Extent(position, position + 1)
    harness.scheduler.edit("a", Edit(1, (point,), "scale", (extent,)))
    harness.scheduler.check_integrity()
    assert (session.stage is not None) is keeps
    harness.ask(session, resume_block=2)
    if keeps:
        assert harness.step() == [("a", 4, 10, 2, BLOCKS, True)]
    else:
        start = min(4, position)
        assert harness.step() == [("a", start, 10, 0, BLOCKS, True)]


def test_ending_an_edit_in_a_block_already_passed_drops_the_stage() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.scheduler.edit("a", Edit(1, (Point("resid", 1),), "scale", (Extent(0),)))
    harness.scheduler.edit("a", Edit(2, (Point("resid", 4),), "scale", (Extent(0),)))
    harness.ask(session, 10, stops=[(2, 0)])
    harness.step()
    harness.scheduler.end_edits("a", [2], 9)
    assert session.stage is not None
    harness.scheduler.end_edits("a", [1], 9)
    assert session.stage is None


def test_truncate_drops_the_stage_if_it_removes_tokens() -> None:
    harness = Harness()
    session = harness.parked()
    harness.scheduler.truncate("a", 10)
    assert session.stage is not None
    harness.scheduler.truncate("a", 9)
    harness.scheduler.check_integrity()
    assert session.stage is None


def test_a_fork_of_a_parked_session_recomputes() -> None:
    harness = Harness()
    harness.parked(stops_from=6)
    copy = harness.scheduler.fork("a", "b", "interactive")
    assert copy is not None, "of the page with positions 4 and 5"
    child = harness.scheduler.session("b")
    assert child.stage is None and child.computed == 6
    harness.ask(child, resume_block=2)
    assert harness.step() == [("b", 6, 10, 0, BLOCKS, True)]


def test_pages_of_a_stage_are_not_found_by_other_sessions() -> None:
    harness = Harness()
    session = harness.parked(stops_from=4)
    other = harness.open("b")
    request = Request(99, 0, 10, 1)
    harness.scheduler.submit("b", request, session.tokens)
    assert harness.step() == [("b", 4, 10, 0, BLOCKS, True)]
    assert other.request is None


def test_positions_that_stop_do_not_use_pages_of_other_sessions() -> None:
    """A page that another session has computed has no activations to look at."""
    harness = Harness()
    first, second = harness.open("a"), harness.open("b")
    harness.ask(first, 10)
    harness.step()
    request = Request(99, 0, 10, 1, stops=(Stop(2, 5),))
    harness.scheduler.submit("b", request, first.tokens[:10])
    assert harness.step() == [("b", 4, 5, 0, BLOCKS, False)]
    assert harness.step() == [("b", 5, 10, 0, 2, False)]
    assert second.stage is not None


@pytest.mark.parametrize("ends", ["cancel", "rollback"])
def test_a_call_that_ends_without_a_breakpoint_drops_its_stage(ends: str) -> None:
    harness = Harness(max_tokens=4)
    session = harness.parked()
    request = harness.ask(session, resume_block=2)
    harness.step()
    getattr(harness.scheduler, ends)(request.id)
    harness.scheduler.check_integrity()
    assert session.stage is None and session.computed == 4


# --- away with the stage --------------------------------------------------------------------------------------------


def gone(harness: Harness, leave: str = "wait") -> tuple[Session, Stage]:
    """A parked session that has left the device, and its stage."""
    session = harness.parked(stops_from=6)
    stage = session.stage
    assert stage is not None
    getattr(harness.scheduler, leave)("a")
    assert session.stage is stage and harness.kv.pages_held("a") == 3, "until its pages have been copied"
    harness.copy()
    assert session.stage is None and session.computed == harness.kv.pages_held("a") == 0
    assert session.left_stage == (stage, 6, 10)
    return session, stage


@pytest.mark.parametrize("leave", ["wait", "pause"])
def test_a_waiting_or_paused_session_takes_its_stage_along_and_brings_it_back(leave: str) -> None:
    harness = Harness(paging=True)
    session, stage = gone(harness, leave)
    harness.scheduler.wake("a") if leave == "wait" else harness.scheduler.resume("a")
    harness.copy()
    assert session.stage is stage and session.left_stage is None
    assert session.computed == 6 and harness.kv.pages_held("a") == 3
    harness.ask(session, resume_block=2)
    assert harness.step() == [("a", 6, 10, 2, BLOCKS, True)]


def test_a_session_that_resumes_waits_for_all_of_its_pages() -> None:
    harness = Harness(paging=True)
    session, stage = gone(harness)
    harness.ask(session, resume_block=2)
    assert harness.scheduler.next_batch() is None
    harness.copy()
    assert session.stage is stage
    assert harness.step() == [("a", 6, 10, 2, BLOCKS, True)]


def test_a_session_woken_while_it_leaves_keeps_its_stage() -> None:
    harness = Harness(paging=True)
    session = harness.parked(stops_from=6)
    harness.scheduler.wait("a")
    all_leave(harness.scheduler)
    harness.ask(session, resume_block=2)
    assert harness.step() == [("a", 6, 10, 2, BLOCKS, True)]


def test_a_quiet_parked_session_leaves_for_the_host() -> None:
    harness = Harness(paging=True)
    session = harness.parked(stops_from=6)
    harness.scheduler.tend(0.0)
    harness.scheduler.tend(1000.0)
    harness.copy()
    assert session.left_stage is not None and harness.scheduler.why("a").state == "parked"


def test_an_edit_keeps_a_left_stage_only_if_it_is_ahead() -> None:
    for block, keeps in ((2, True), (3, True), (1, False)):
        harness = Harness(paging=True)
        session, _ = gone(harness)
        harness.scheduler.edit("a", Edit(1, (Point("resid", block),), "add", (Extent(6),), rows=1, values=b"v\0\0\0"))
        harness.scheduler.check_integrity()
        assert (session.left_stage is not None) is keeps
        harness.ask(session, resume_block=2)
        assert (harness.scheduler.next_batch() is None) is keeps, "else the device has what is of use"
        harness.copy()
        assert harness.step() == [("a", 6 if keeps else 4, 10, 2 if keeps else 0, BLOCKS, True)]


def test_calls_without_resume_begin_at_the_stopped_position() -> None:
    """Only the full pages that come back for them are of use."""
    harness = Harness(paging=True)
    session, _ = gone(harness)
    harness.scheduler.wake("a")
    harness.ask(session, 3)
    harness.copy()
    assert session.stage is None and session.left_stage is None
    assert harness.step() == [("a", 4, 13, 0, BLOCKS, True)]


def test_imported_kv_leaves_without_the_stage() -> None:
    """If a partly filled page left under a key of the stage, calls without `resume` would not find it."""
    for foreign, leaves_with_stage in ((4, True), (5, False)):
        harness = Harness(paging=True)
        session = harness.parked(stops_from=6)
        session.foreign_tokens = foreign
        harness.scheduler.wait("a")
        harness.copy()
        assert (session.left_stage is not None) is leaves_with_stage
        harness.ask(session, 3)
        assert (harness.scheduler.next_batch() is None) is not leaves_with_stage
        harness.copy()
        assert harness.step() == [("a", 4 if leaves_with_stage else 6, 13, 0, BLOCKS, True)]


def test_a_stage_with_a_lost_page_is_run_again() -> None:
    harness = Harness(paging=True)
    session, _ = gone(harness)
    host = harness.scheduler.queues["m"].residency.paging.host
    assert host is not None
    last = harness.scheduler.queues["m"].residency.lower_tiers.keys(session)[-1]
    slot = host.peek(last)
    assert slot is not None
    host.abandon(slot)
    harness.ask(session, resume_block=2)
    assert harness.step() == [("a", 4, 10, 0, BLOCKS, True)]


def test_a_stage_that_has_passed_few_blocks_is_run_again_if_that_is_cheaper() -> None:
    for block, comes_back in ((1, False), (5, True)):
        harness = Harness(pages=64, paging=True)
        session = harness.parked(block, 200)
        harness.scheduler.queues["m"].residency.lower_tiers.costs = Costs(
            bus=0.5, prefill=1.0
        )  # 50 pages take as long as 100 tokens
        harness.scheduler.wait("a")
        harness.copy()
        harness.ask(session, resume_block=block)
        assert (harness.scheduler.next_batch() is None) is comes_back


def overwritten(harness: Harness) -> None:
    """Overwrites the device's free pages, so that no page of a session that has left can be found."""
    other = harness.open("other")
    harness.ask(other, 4 * harness.kv.pool.capacity - 1)
    while other.request is not None:
        harness.step()
    harness.scheduler.close("other")


@pytest.mark.parametrize("leave", ["wait", "pause"])
def test_a_session_that_turns_back_while_it_arrives_keeps_its_stage(leave: str) -> None:
    harness = Harness(paging=True)
    session, stage = gone(harness)
    overwritten(harness)
    harness.scheduler.wake("a")
    assert harness.scheduler.queues["m"].residency.is_arriving(session)
    getattr(harness.scheduler, leave)("a")
    all_leave(harness.scheduler)
    harness.scheduler.check_integrity()
    assert session.left_stage == (stage, 6, 10) and harness.kv.pages_held("a") == 0 and session.left_at == 6
    harness.copy()
    harness.scheduler.wake("a") if leave == "wait" else harness.scheduler.resume("a")
    harness.ask(session, resume_block=2)
    while harness.scheduler.next_batch() is None:
        harness.copy()
    assert session.stage is stage


def test_a_session_that_could_not_come_back_whole_keeps_its_stage() -> None:
    """The device has the first of its pages, and no room for the others."""
    harness = Harness(paging=True, pages=6)
    session, stage = gone(harness)
    other = harness.open("b")
    harness.ask(other, 19)
    assert harness.step()
    harness.scheduler.wake("a")
    harness.scheduler.wait("a")
    all_leave(harness.scheduler)
    harness.scheduler.check_integrity()
    assert session.left_stage == (stage, 6, 10) and harness.kv.pages_held("a") == 0


def test_a_fork_of_an_arriving_session_leaves_it_its_stage() -> None:
    harness = Harness(paging=True)
    session, stage = gone(harness)
    overwritten(harness)
    harness.scheduler.wake("a")
    harness.scheduler.fork("a", "child", "agent")
    harness.scheduler.check_integrity()
    assert session.left_stage == (stage, 6, 10)
    harness.ask(session, resume_block=2)
    while harness.scheduler.next_batch() is None:
        harness.copy()
    assert session.stage is stage


@pytest.mark.parametrize("where", ["here", "arriving", "elsewhere"])
def test_a_session_that_resumes_from_an_earlier_hit_stops_at_the_breakpoint(where: str) -> None:
    """Wherever its pages are, it stops at the first position of the breakpoint."""
    harness = Harness(paging=True)
    session = harness.open("a")
    for request in ({"prompt": 10, "stops": [(2, 2)]}, {"stops": [(4, 9)], "resume_block": 2}):
        harness.ask(session, **request)  # type: ignore[arg-type]
        while session.request is not None:
            harness.step()
    assert session.stage is not None and (session.stage.first, session.computed) == (4, 9)
    if where != "here":
        harness.scheduler.wait("a")
        harness.copy()
        overwritten(harness)
    if where == "arriving":
        harness.scheduler.wake("a")
        assert harness.scheduler.queues["m"].residency.is_arriving(session)
    request = harness.ask(session, stops=[(4, 2)], resume_block=2)
    ran: list[RowOf] = []
    while session.request is not None:
        harness.copy()
        if harness.scheduler.next_batch() is not None:
            ran += harness.step()
    assert ran == [("a", 2, 10, 0, 4, False)] and request.stopped == Stop(4, 2)


def test_a_paused_session_leaves_even_if_it_loses_its_stage_meanwhile() -> None:
    harness = Harness(paging=True)
    session = harness.parked(stops_from=6)
    harness.scheduler.pause("a")
    harness.ask(session, resume_block=2)
    harness.scheduler.drop_stage("a")
    harness.copy()
    assert session.stage is None and harness.kv.pages_held("a") == 0


@pytest.mark.parametrize("lost", ["gone", "on its way out", "another call"])
def test_pages_of_a_stage_that_is_lost_can_be_spared(lost: str) -> None:
    harness = Harness(paging=True)
    host = harness.scheduler.queues["m"].residency.paging.host
    assert host is not None
    if lost == "on its way out":
        session = harness.parked(stops_from=6)
        harness.scheduler.wait("a")
        all_leave(harness.scheduler)
        moves = harness.scheduler.queues["m"].residency.paging.moves
        for move in moves.take(3):
            moves.landed(move)
            moves.sealed(move, 7)
        harness.ask(session, resume_block=2)
    else:
        session, _ = gone(harness)
        if lost == "gone":
            harness.scheduler.drop_stage("a")
        else:
            harness.ask(session, 3)
    spare = sum(map(host.is_spare, host.complete_slots))
    assert spare == 2, "and the full page stays"


def test_a_wait_during_a_call_does_not_prevent_the_stop() -> None:
    harness = Harness(paging=True)
    session = harness.open("a")
    request = harness.ask(session, 10, stops=[(2, 0)])
    harness.scheduler.wait("a")
    harness.step()
    assert request.stopped == Stop(2, 0)
    harness.copy()
    assert session.left_stage is not None and session.left_stage.computed == 0


def test_why_says_where_it_stopped() -> None:
    harness = Harness()
    harness.parked()
    why = harness.scheduler.why("a")
    assert (why.state, why.figures["block"]) == ("parked", 2) and "before block 2" in why.reason


# --- in a step with others ------------------------------------------------------------------------------------------


def test_rows_of_one_token_mix_whatever_their_blocks_are() -> None:
    harness = Harness()
    session = harness.parked(prompt=1)
    for name in "bc":
        harness.ask(harness.open(name), 3, max_tokens=9)
    harness.step()
    harness.ask(session, resume_block=2)
    batch = harness.compose()
    assert {(row.session.id, row.first_block) for row in batch.rows} == {("a", 2), ("b", 0), ("c", 0)}
    assert blocks_of(batch.rows) == range(BLOCKS)


@pytest.mark.parametrize(("token_s", "apart"), [(1.0, True), (0.0, False)])
def test_chunks_get_a_step_of_their_own_if_that_takes_less_time(token_s: float, apart: bool) -> None:
    harness = Harness(max_tokens=32)
    measured(harness.scheduler.queues["m"].batch_builder.times, rising(1.0, token_s))
    session = harness.parked(prompt=10)
    harness.ask(harness.open("b"), 10)
    harness.ask(session, resume_block=2)
    if not apart:
        assert {row[0] for row in harness.step()} == {"a", "b"}
        return
    assert harness.step() == [("b", 0, 10, 0, BLOCKS, True)]
    assert harness.step() == [("a", 0, 10, 2, BLOCKS, True)]


def test_a_session_left_out_for_a_step_of_its_own_is_first_in_the_next() -> None:
    """Three kinds of rows that share no step, in calls without end; the first session is always first in line."""
    harness = Harness(pages=512)
    measured(harness.scheduler.queues["m"].batch_builder.times, rising(0.1, 1.0))
    kinds = {"whole": [], "two": [(2, 0)], "four": [(4, 0)]}
    running = dict.fromkeys(kinds, "")
    order = []
    for number in range(12):
        for kind, stops in kinds.items():
            if not running[kind]:
                running[kind] = f"{kind}-{number}"
                harness.ask(
                    harness.open(running[kind], priority="interactive" if kind == "whole" else "batch"), 8, stops=stops
                )
        ((name, *_),) = harness.step()
        order.append(name.partition("-")[0])
        running[order[-1]] = ""
    assert all(set(order[i : i + 3]) == kinds.keys() for i in range(10)), order


def test_steps_through_a_part_of_the_blocks_do_not_count_as_step_times() -> None:
    harness = Harness()
    times = harness.scheduler.queues["m"].batch_builder.times
    measured(times, rising(0.1, 0.001))
    before = times.predict(1, 9)
    harness.ask(harness.open("a"), 10, stops=[(1, 0)])
    for _ in range(8):
        batch = harness.compose()
        harness.scheduler.queues["m"].batch_builder.ran(batch.rows, 1e-6)
    assert times.predict(1, 9) == before
