from __future__ import annotations

from itertools import count

import pytest

from djinn_client.errors import OutOfMemory, PromptTooLong, SessionNotFound
from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import LATE, Batch
from djinnd.core.edits import FOREVER, Edit, Extent
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.policy import Policy
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.tuning import FAIRNESS, STEP
from tests.support.virtual import UNLIMITED, VirtualDevice, rising

PAGE = 4  # tokens


class Harness:
    """A scheduler, request ids, and a model that always samples `token`."""

    def __init__(self, *models: str, pages: int = 64, max_context: int = 64, max_batch_tokens: int = 32) -> None:
        self.scheduler = Scheduler(max_batch_tokens, max_rows=8)
        self.kv = {name: KvManager(pages + 1, PAGE, 1 << 20, max_context) for name in models or ("m",)}
        for name, kv in self.kv.items():
            self.scheduler.add_model(name, kv, max_context, num_blocks=2)
        self._ids = count(1)

    def open(self, name: str, model: str = "m", tenant: int = 1000, tokens: int = 0) -> Session:
        session = Session(name, model, tenant, "interactive", tokens=[7] * tokens)
        self.scheduler.open(session)
        return session

    def submit(self, name: str, prompt: int, max_tokens: int = 8, **more: object) -> Request:
        first = len(self.scheduler.session(name).tokens)
        request = Request(next(self._ids), first, first + prompt, max_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.submit(name, request, [7] * prompt)
        return request

    def step(self, token: int = 5) -> tuple[Batch, list[Request]]:
        batch = self.scheduler.next_batch()
        assert batch is not None
        return batch, self.complete(batch, token)

    def complete(self, batch: Batch, token: int = 5) -> list[Request]:
        finished = self.scheduler.complete(batch, [token] * sum(row.samples for row in batch.rows))
        self.scheduler.check_integrity()
        return finished


# --- a request from end to end --------------------------------------------------------------------------------------


def test_a_request_ends_if_no_token_could_be_sampled() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", 6)
    harness.step(token=5)
    batch = harness.scheduler.next_batch()
    assert batch is not None and harness.scheduler.complete(batch, [None]) == [request]
    harness.scheduler.check_integrity()
    assert (request.finish_reason, session.tokens[6:], session.computed) == ("not_finite", [5], 7)
    harness.submit("a", 0)
    batch, _ = harness.step()
    assert [(row.start, row.end) for row in batch.rows] == [(6, 7)], "the last token's logits choose the next one"


def test_a_generation_runs_its_prompt_then_a_token_a_step_until_it_has_enough() -> None:
    harness = Harness(max_batch_tokens=4)
    session = harness.open("a")
    request = harness.submit("a", prompt=6, max_tokens=3)
    assert request.state is RequestState.QUEUED
    ends = []
    for _ in range(4):
        batch, finished = harness.step()
        ends.append((batch.rows[0].start, batch.rows[0].end, batch.rows[0].samples))
    assert ends == [(0, 4, False), (4, 6, True), (6, 7, True), (7, 8, True)]
    assert finished == [request] and session.request is None
    assert (request.state, request.finish_reason, request.computed) == (RequestState.DONE, "length", 6)
    assert session.tokens == [7] * 6 + [5] * 3 and session.computed == 8
    assert harness.scheduler.next_batch() is None


def test_a_session_goes_on_from_its_kv() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=6, max_tokens=1)
    harness.step()
    request = harness.submit("a", prompt=2, max_tokens=1)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].end) == (6, 9)  # it includes the last generated token, which had no KV
    assert request.computed == 3


def test_without_a_prompt_the_last_token_is_run_again_if_it_has_kv() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=6, max_tokens=0, logits=True, seen_from=0)
    harness.step()
    assert session.computed == 6
    harness.submit("a", prompt=0, max_tokens=1)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].count, batch.rows[0].samples) == (5, 1, True)


def test_a_forward_pass_ends_with_its_last_token_and_generates_none() -> None:
    harness = Harness(max_batch_tokens=4)
    session = harness.open("a")
    request = harness.submit("a", prompt=6, max_tokens=0, logits=True, seen_from=0)
    assert harness.step()[1] == []
    assert harness.step()[1] == [request]
    assert (request.finish_reason, request.computed, session.tokens) == ("length", 6, [7] * 6)


def test_a_stop_token_ends_a_generation_and_stays_in_the_session() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", prompt=2, stop_tokens=frozenset({9}))
    harness.step()
    assert harness.step(token=9)[1] == [request]
    assert request.finish_reason == "stop" and session.tokens == [7, 7, 5, 9]


@pytest.mark.parametrize(("pages", "max_context"), [(64, 10), (2, 64)])
def test_a_generation_ends_at_the_limit_of_the_context_or_the_pool(pages: int, max_context: int) -> None:
    harness = Harness(pages=pages, max_context=max_context)
    session = harness.open("a")
    request = harness.submit("a", prompt=6, max_tokens=50)
    finished: list[Request] = []
    while not finished:
        _, finished = harness.step()
    assert request.finish_reason == "length"
    assert len(session.tokens) == min(max_context, pages * PAGE)


def test_a_request_that_never_fits_is_refused_and_nothing_is_changed() -> None:
    harness = Harness(pages=4, max_context=32)
    session = harness.open("a", tokens=10)
    with pytest.raises(OutOfMemory):
        harness.submit("a", prompt=6, max_tokens=1)
    with pytest.raises(PromptTooLong):
        harness.submit("a", prompt=23, max_tokens=0)
    assert len(session.tokens) == 10 and session.request is None
    assert harness.scheduler.next_batch() is None
    harness.scheduler.check_integrity()
    harness.submit("a", prompt=6, max_tokens=0)  # a forward pass needs no room for a next token


def test_a_busy_session_takes_no_second_request() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=2)
    with pytest.raises(AssertionError):
        harness.submit("a", prompt=2)


def test_a_request_with_nothing_to_run_is_an_assertion_error() -> None:
    harness = Harness()
    harness.open("empty")
    with pytest.raises(AssertionError, match="nothing to run"):
        harness.submit("empty", prompt=0, max_tokens=1)
    harness.open("full", tokens=3)
    harness.scheduler.session("full").computed = 3
    with pytest.raises(AssertionError, match="nothing to run"):
        harness.submit("full", prompt=0, max_tokens=0)


def test_a_step_ends_before_a_position_that_may_not_be_finite() -> None:
    harness = Harness()
    session = harness.open("a")
    session.edits = (Edit(1, (Point("resid", 1),), "scale", (Extent(6, 7),), scale=1e9),)
    harness.submit("a", 10)
    read = []
    for _ in range(2):
        batch, _ = harness.step()
        read += [(row.start, row.end, row.samples) for row in batch.rows]
    assert read == [(0, 6, False), (6, 10, True)]


# --- events between steps -------------------------------------------------------------------------------------------


def test_cancel_keeps_the_tokens_and_the_session() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", prompt=6)
    harness.step()
    assert harness.scheduler.cancel(request.id) is request
    assert (request.state, request.finish_reason) == (RequestState.DONE, "cancelled")
    assert session.tokens == [7] * 6 + [5] and session.request is None
    assert harness.scheduler.cancel(request.id) is None
    harness.submit("a", prompt=1, max_tokens=1)
    assert harness.step()[0].rows[0].start == 6


def test_halt_stops_after_the_tokens_that_are_kept() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", prompt=6)
    for _ in range(5):
        harness.step()
    assert harness.scheduler.halt(request.id, keep=2) is request
    assert request.finish_reason == "stop"
    assert session.tokens == [7] * 6 + [5] * 2 and session.computed == 8
    assert harness.kv["m"].pages_held("a") == 2
    assert harness.scheduler.halt(request.id, keep=0) is None
    harness.scheduler.check_integrity()


@pytest.mark.parametrize("keep", [-1, 3])
def test_halt_keeps_no_tokens_that_were_not_generated(keep: int) -> None:
    harness = Harness()
    harness.open("a")
    request = harness.submit("a", prompt=6)
    harness.step()
    with pytest.raises(AssertionError):
        harness.scheduler.halt(request.id, keep)


def test_rollback_restores_the_session_s_tokens() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=6, max_tokens=2)
    harness.step()
    harness.step()
    request = harness.submit("a", prompt=3)
    harness.step()
    assert harness.scheduler.next_batch() is not None  # the step that fails
    assert harness.scheduler.rollback(request.id) is request
    assert (request.state, request.finish_reason) == (RequestState.DONE, None)
    assert session.tokens == [7] * 6 + [5] * 2 and session.computed == 8
    assert harness.scheduler.rollback(request.id) is None
    harness.scheduler.check_integrity()


def test_a_held_request_has_no_row_until_it_is_released() -> None:
    harness = Harness()
    harness.open("a")
    request = harness.submit("a", prompt=6)
    harness.step()
    for _ in range(2):  # a second hold changes nothing
        harness.scheduler.hold(request.id)
        assert request.state is RequestState.HELD
        assert harness.scheduler.next_batch() is None
        harness.scheduler.check_integrity()
    for _ in range(2):  # a second release changes nothing either
        harness.scheduler.release(request.id)
        assert request.state is RequestState.RUNNING
        harness.scheduler.check_integrity()
    assert [row.start for row in harness.step()[0].rows] == [6]


def test_hold_and_release_of_a_request_that_has_ended_change_nothing() -> None:
    harness = Harness()
    harness.open("a")
    request = harness.submit("a", prompt=2, max_tokens=1)
    harness.step()
    harness.scheduler.hold(request.id)
    harness.scheduler.release(request.id)
    assert request.state is RequestState.DONE and harness.scheduler.next_batch() is None


def test_a_held_request_can_be_cancelled() -> None:
    harness = Harness()
    harness.open("a")
    request = harness.submit("a", prompt=2)
    harness.scheduler.hold(request.id)
    assert harness.scheduler.cancel(request.id) is request
    harness.scheduler.check_integrity()


def test_truncate_frees_the_pages_of_the_tokens_cut_off() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=16, max_tokens=1)
    harness.step()
    harness.scheduler.truncate("a", 5)
    assert (len(session.tokens), session.computed, harness.kv["m"].pages_held("a")) == (5, 5, 2)
    harness.scheduler.check_integrity()
    harness.submit("a", prompt=1)
    with pytest.raises(AssertionError, match="is truncated while request 2 runs"):
        harness.scheduler.truncate("a", 1)


def test_close_frees_all_pages_and_cancels_the_request() -> None:
    harness = Harness()
    harness.open("a")
    harness.open("b")
    request = harness.submit("a", prompt=6)
    harness.step()
    assert harness.scheduler.close("a") is request and request.finish_reason == "cancelled"
    assert harness.scheduler.close("b") is None
    assert harness.kv["m"].pool.used == 0
    harness.scheduler.check_integrity()


def test_an_unknown_session_raises() -> None:
    harness = Harness()
    for call in (harness.scheduler.session, harness.scheduler.close, lambda name: harness.scheduler.truncate(name, 0)):
        with pytest.raises(SessionNotFound, match="there is no session ghost"):
            call("ghost")
    with pytest.raises(SessionNotFound):
        harness.scheduler.submit("ghost", Request(1, 0, 1, 1), [7])


# --- events while a step runs ---------------------------------------------------------------------------------------


def test_a_row_whose_request_ended_while_the_step_ran_is_ignored() -> None:
    harness = Harness()
    sessions = [harness.open(name) for name in "abc"]
    requests = [harness.submit(name, prompt=2, max_tokens=2) for name in "abc"]
    harness.step()
    batch = harness.scheduler.next_batch()
    assert batch is not None
    harness.scheduler.close("a")
    harness.scheduler.cancel(requests[1].id)
    harness.submit("b", prompt=4, max_tokens=2)
    assert harness.complete(batch) == [requests[2]]
    assert [session.tokens for session in sessions] == [[7, 7, 5], [7, 7, 5, 7, 7, 7, 7], [7, 7, 5, 5]]
    assert sessions[1].computed == 2


def test_a_request_held_while_its_step_ran_keeps_its_token_and_may_end() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", prompt=2, max_tokens=2)
    for _ in range(2):
        batch = harness.scheduler.next_batch()
        assert batch is not None
        harness.scheduler.hold(request.id)
        finished = harness.complete(batch)
        harness.scheduler.release(request.id)
    assert finished == [request] and session.tokens == [7, 7, 5, 5]


def test_one_row_of_a_step_can_be_rolled_back_and_the_rest_completed() -> None:
    harness = Harness()
    bad, good = harness.open("bad"), harness.open("good")
    request = harness.submit("bad", prompt=2)
    harness.submit("good", prompt=2)
    batch = harness.scheduler.next_batch()
    assert batch is not None
    harness.scheduler.rollback(request.id)
    harness.complete(batch)
    assert (bad.tokens, good.tokens) == ([], [7, 7, 5])


def test_a_batch_that_never_completes_is_run_again() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=6)
    lost = harness.scheduler.next_batch()
    batch = harness.scheduler.next_batch()
    assert lost and batch and lost.rows == batch.rows and lost.step < batch.step
    with pytest.raises(AssertionError, match="step 1 completes after step 2"):
        harness.scheduler.complete(lost, [5])
    harness.complete(batch)
    assert session.tokens == [7] * 6 + [5]


def test_a_step_completes_once_and_with_a_token_for_each_row_that_samples() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=6)
    batch = harness.scheduler.next_batch()
    assert batch
    with pytest.raises(AssertionError, match="2 tokens for 1 rows"):
        harness.scheduler.complete(batch, [5, 5])
    harness.complete(batch)
    with pytest.raises(AssertionError, match="step 1 completes twice"):
        harness.scheduler.complete(batch, [5])


# --- pages and turns ------------------------------------------------------------------------------------------------


def test_a_preempted_request_goes_on_from_its_tokens() -> None:
    harness = Harness(pages=3)
    harness.open("first")
    harness.open("second", tenant=1001)
    harness.submit("first", prompt=4, max_tokens=6)
    harness.submit("second", prompt=6, max_tokens=3)
    order = []
    while (batch := harness.scheduler.next_batch()) is not None:
        order.append([(row.session.id, row.start, row.count) for row in batch.rows])
        harness.complete(batch)
    assert order[0] == [("first", 0, 4), ("second", 0, 6)]
    assert order[1] == [("first", 4, 1)]  # the fifth token takes a page, and the last to arrive loses its own
    assert order[-3:] == [[("first", 8, 1)], [("second", 0, 7)], [("second", 7, 1)]]
    assert [len(harness.scheduler.session(name).tokens) for name in ("first", "second")] == [10, 9]


def test_prompt_tokens_are_not_counted_again_when_they_are_recomputed() -> None:
    harness = Harness(pages=3)
    harness.open("first")
    harness.open("second")
    harness.submit("first", prompt=4, max_tokens=6)
    request = harness.submit("second", prompt=6, max_tokens=3)
    while (batch := harness.scheduler.next_batch()) is not None:
        harness.complete(batch)
    assert request.computed == 6  # without the seven that ran again after the preemption


def test_an_idle_session_recomputes_the_kv_of_pages_that_others_were_given() -> None:
    harness = Harness(pages=4)
    harness.open("idle")
    harness.open("busy", tenant=1001)
    harness.submit("idle", prompt=10, max_tokens=1)
    harness.step()
    harness.submit("busy", prompt=10, max_tokens=1)
    harness.step()
    assert harness.kv["m"].pages_held("idle") == 0
    request = harness.submit("idle", prompt=1, max_tokens=1)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].end, request.computed) == (4, 12, 8), "its first page was still free"


def test_pages_that_change_tenants_are_to_be_zeroed() -> None:
    harness = Harness(pages=2)
    harness.open("a", tenant=1000)
    harness.open("b", tenant=1001)
    harness.submit("a", prompt=6, max_tokens=1)
    harness.step()
    assert harness.kv["m"].pool.take_stale() == []
    harness.scheduler.close("a")
    harness.submit("b", prompt=6, max_tokens=1)
    harness.scheduler.next_batch()
    assert harness.kv["m"].pool.take_stale() == sorted(harness.kv["m"].pages_of("b"))


def test_models_that_have_work_take_turns() -> None:
    harness = Harness("m", "n", "empty")
    harness.open("a", "m")
    harness.open("b", "n")
    harness.open("c", "m")
    harness.submit("a", prompt=2, max_tokens=3)
    harness.submit("b", prompt=2, max_tokens=2)
    harness.submit("c", prompt=2, max_tokens=2)
    assert [harness.step()[0].model for _ in range(5)] == ["m", "n", "m", "n", "m"]
    assert harness.scheduler.next_batch() is None


def test_a_model_is_removed_after_its_sessions() -> None:
    harness = Harness("m", "n")
    harness.open("a", "m")
    with pytest.raises(AssertionError, match="model m is removed while 1 sessions use it"):
        harness.scheduler.remove_model("m")
    harness.submit("a", prompt=2)
    batch = harness.scheduler.next_batch()
    assert batch
    harness.scheduler.close("a")
    harness.scheduler.remove_model("m")
    assert harness.complete(batch) == []
    assert harness.scheduler.queues.keys() == {"n"}


def test_the_kv_of_a_session_of_an_earlier_engine_is_recomputed() -> None:
    harness = Harness()
    harness.open("a", tokens=10)
    harness.submit("a", prompt=0, max_tokens=1)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].end) == (0, 10)


def test_the_audit_finds_a_request_that_was_forgotten() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=3)
    session.request = None
    with pytest.raises(AssertionError, match=r"requests \[\] are in progress, not \[1\]"):
        harness.scheduler.check_integrity()


def test_the_audit_finds_a_session_in_no_queue() -> None:
    harness = Harness()
    harness.open("a")
    harness.scheduler.queues["m"].sessions.clear()
    with pytest.raises(AssertionError, match=r"\['a'\] are not in their queue"):
        harness.scheduler.check_integrity()


# --- time, classes and tenants --------------------------------------------------------------------------------------


def test_time_only_goes_forward() -> None:
    scheduler = Scheduler(8, 8)
    scheduler.tick(3.0)
    scheduler.tick(3.0)
    with pytest.raises(AssertionError):
        scheduler.tick(2.9)


def test_a_running_session_changes_its_class_with_the_next_step_and_loses_nothing() -> None:
    device = VirtualDevice(max_rows=1)
    first = device.open("first", "agent")
    device.open("second", "agent")
    device.run(0.1)
    assert set(device.rows) == {"first"}
    device.scheduler.set_class("second", "interactive")
    for _ in range(3):
        device.step()
    assert device.rows["second"] == 3
    computed = first.computed
    device.scheduler.set_class("second", "batch")
    device.step()
    assert first.computed == computed + 1 and first.priority == "agent"
    device.scheduler.set_class("ghost", "batch")
    device.scheduler.check_integrity()


def test_the_class_of_a_held_or_idle_session_counts_when_it_runs() -> None:
    device = VirtualDevice(max_rows=1)
    device.open("other", "agent", tenant=2)
    held = device.open("held", "batch")
    request = held.request
    assert request is not None
    device.scheduler.hold(request.id)
    device.scheduler.set_class("held", "interactive")
    device.release(request)
    device.step()
    assert device.batches[-1] == [("held", 1)]


def test_tenants_are_charged_for_their_rows_and_together_for_the_whole_step() -> None:
    device = VirtualDevice(seconds=rising(0.1, 0.01), weights={3: 2.0}, policy=UNLIMITED)
    device.open("a", "agent", tenant=1)
    device.open("b", "agent", tenant=2, prompt=41)
    device.open("c", "batch", tenant=3, prompt=21)
    batch = device.step()
    assert batch is not None and batch.tokens == 63
    shares = device.scheduler.shares
    row = device.seconds(3) / 3
    clocks = [shares.clock("agent", 1), shares.clock("agent", 2), shares.clock("batch", 3) * 2.0]
    assert clocks == pytest.approx([row, row + 40 * 0.01, row + 20 * 0.01], rel=0.05)
    assert sum(clocks) == pytest.approx(device.now)


def test_a_slow_decode_step_is_charged_in_full() -> None:
    device = VirtualDevice(seconds=rising(0.1, 0.0))
    for tenant in (1, 2):
        device.open(f"s{tenant}", tenant=tenant)
    device.seconds = rising(0.7, 0.0)
    device.step()
    assert [device.scheduler.shares.clock("agent", tenant) for tenant in (1, 2)] == pytest.approx([0.35, 0.35])


def test_unmeasured_steps_are_charged_with_the_next_measured_one() -> None:
    device = VirtualDevice(max_tokens=32)
    device.open("s", tenant=1, prompt=64)
    for seconds in (0.0, 0.3):
        batch = device.scheduler.next_batch()
        assert batch is not None
        device.scheduler.complete(batch, [0] * sum(row.samples for row in batch.rows), seconds)
    assert device.scheduler.shares.clock("agent", 1) == pytest.approx(0.3)


def test_within_a_tenant_the_deadline_that_must_be_begun_first_comes_first() -> None:
    """Neither session has had a row, so the tokens left to generate decide which deadline is more pressing."""
    device = VirtualDevice(max_rows=1, seconds=rising(0.1, 0.0))
    device.open("none")
    device.open("late", deadline=60.0, max_tokens=10)
    device.open("soon", deadline=30.0, max_tokens=10)
    device.open("long", deadline=60.0, expected_tokens=500, max_tokens=1000)
    device.step()
    assert device.batches == [[("long", 1)]]
    device.scheduler.close("long")
    device.run(4.0)
    assert [names[0][0] for names in device.batches[1:]] == ["soon"] * 10 + ["late"] * 10 + ["none"] * 20


def test_a_deadline_gives_no_more_than_the_tenant_s_share() -> None:
    device = VirtualDevice(max_rows=1, seconds=rising(0.1, 0.0))
    device.open("urgent", tenant=1, deadline=0.5)
    device.open("patient", tenant=2)
    device.run(20.0)
    assert abs(device.rows["urgent"] - device.rows["patient"]) <= 4


def test_the_model_with_the_higher_class_runs_until_the_other_has_aged() -> None:
    device = VirtualDevice("m", "n", seconds=rising(0.1, 0.0), policy=Policy(ageing=2.0))
    device.open("high", "interactive", model="m")
    device.open("low", "batch", model="n")
    for _ in range(20):
        device.step()
    assert device.rows == {"high": 20}
    for _ in range(2 * FAIRNESS.aged_rows):
        device.step()
    assert device.rows["low"] == FAIRNESS.aged_rows


def test_models_with_aged_sessions_take_turns_regardless_of_clocks() -> None:
    """Steps are so slow that one of the many sessions has always aged."""
    device = VirtualDevice("m", "n", seconds=rising(0.5, 0.0), max_rows=1, policy=Policy(ageing=1.0))
    for number in range(4):
        device.open(f"crowd-{number}", "batch", tenant=1, model="m")
    device.open("high", "interactive", tenant=2, model="n")
    device.scheduler.shares.charge("interactive", 2, 1000.0)
    for _ in range(64):
        device.step()
    assert device.rows["high"] >= 24


def test_models_take_turns_by_their_tenants_clocks_after_one_was_alone_for_long() -> None:
    device = VirtualDevice("m", "n", seconds=rising(0.1, 0.0))
    device.open("old", tenant=1, model="m")
    device.run(60.0)
    before = device.rows["old"]
    device.open("new", tenant=2, model="n")
    device.run(10.0)
    assert device.rows["old"] - before >= 40 and device.rows["new"] >= 40


def test_a_tenant_on_two_models_gets_no_more_than_a_tenant_on_one() -> None:
    device = VirtualDevice("m", "n", seconds=rising(0.1, 0.0), max_rows=1)
    device.open("a-m", tenant=1, model="m")
    device.open("a-n", tenant=1, model="n")
    device.open("b-m", tenant=2, model="m")
    device.run(40.0)
    assert device.used["agent", 1] == pytest.approx(device.used["agent", 2], rel=0.1)


def test_an_aged_session_beside_an_endless_prompt_reads_a_little_of_its_own() -> None:
    device = VirtualDevice(max_rows=4, max_tokens=128, policy=Policy(ageing=0.5))
    device.open("reads", "interactive", prompt=16_000 - 1, max_tokens=1)
    device.open("low", "batch", prompt=1000)
    while not device.rows["low"]:
        device.step()
    assert ("low", STEP.least_chunk) in device.batches[-1]


def test_decoding_sessions_of_lower_classes_leave_a_higher_prompt_its_row() -> None:
    device = VirtualDevice(max_rows=8, seconds=rising(0.01, 0.0))
    device.open("i", "interactive")
    for number in range(20):
        device.open(f"b{number}", "batch", tenant=2)
    device.run(0.5)
    device.open("p", "interactive", prompt=20)
    device.step()
    assert device.rows["p"] == 1


def test_no_session_with_a_row_is_evicted_for_another_in_the_same_step() -> None:
    """A session may be given pages that its tenant shares, and then holds some. That must not put it before sessions
    that already have their rows."""
    harness = Harness(pages=4)
    for name, tenant in (("a", 1000), ("first", 1000), ("late", 1001)):
        harness.open(name, tenant=tenant)
    harness.submit("a", prompt=4, max_tokens=0)
    harness.step()
    harness.submit("late", prompt=4, max_tokens=8)
    harness.step()
    harness.submit("first", prompt=14, max_tokens=1)
    for _ in range(3):
        batch = harness.scheduler.next_batch()
        assert batch is not None
        for row in batch.rows:
            assert harness.kv["m"].fits(row.session.id, row.end)
        harness.complete(batch)


# --- forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_continues_its_parent_and_neither_changes_the_other() -> None:
    harness = Harness()
    parent = harness.open("a")
    harness.submit("a", prompt=9, max_tokens=2)
    harness.step()
    harness.step()
    copy = harness.scheduler.fork("a", "b", "batch")
    child = harness.scheduler.session("b")
    assert (child.tokens, child.computed, child.tenant, child.priority) == (parent.tokens, 10, 1000, "batch")
    assert copy == (harness.kv["m"].pages_of("a")[2], harness.kv["m"].pages_of("b")[2])
    request = harness.submit("b", prompt=1, max_tokens=1)
    batch, finished = harness.step(token=6)
    assert (batch.tokens, finished, request.computed) == (2, [request], 2)
    assert len(parent.tokens) == 11 and len(child.tokens) == 13
    harness.scheduler.close("a")
    harness.scheduler.check_integrity()
    assert child.computed == 12 and harness.kv["m"].pool.used == 3


@pytest.mark.parametrize(("length", "computed"), [(12, 12), (8, 8), (7, 4), (5, 4), (3, 0)])
def test_a_fork_truncated_within_a_shared_page_recomputes_it(length: int, computed: int) -> None:
    harness = Harness()
    parent = harness.open("a")
    harness.submit("a", prompt=12, max_tokens=0)
    harness.step()
    harness.scheduler.fork("a", "b", "agent")
    harness.scheduler.truncate("b", length)
    harness.scheduler.check_integrity()
    assert (harness.scheduler.session("b").computed, parent.computed) == (computed, 12)


def test_a_fork_whose_last_token_runs_again_writes_into_a_page_of_its_own() -> None:
    """After a forward pass every token has KV. The last one runs again, because the next token is sampled from its
    logits."""
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=8, max_tokens=0)
    harness.step()
    harness.scheduler.fork("a", "b", "agent")
    harness.submit("b", prompt=0, max_tokens=1)
    harness.scheduler.check_integrity()
    batch, _ = harness.step()
    (row,) = batch.rows
    assert (row.start, row.count, row.samples) == (4, 4, True)
    assert harness.kv["m"].pages_of("b")[0] == harness.kv["m"].pages_of("a")[0]
    assert harness.kv["m"].pages_of("b")[1] != harness.kv["m"].pages_of("a")[1]


def test_an_unknown_or_busy_session_cannot_be_forked() -> None:
    harness = Harness()
    with pytest.raises(SessionNotFound):
        harness.scheduler.fork("a", "b", "agent")
    harness.open("a")
    harness.submit("a", prompt=8)
    with pytest.raises(AssertionError):
        harness.scheduler.fork("a", "b", "agent")
    harness.scheduler.check_integrity()


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_the_second_session_of_a_tenant_runs_only_the_new_part_of_its_prompt() -> None:
    harness = Harness()
    for name, tenant in (("a", 1000), ("b", 1000), ("c", 1001)):
        harness.open(name, tenant=tenant)
    harness.submit("a", prompt=12, max_tokens=1)
    harness.step()
    requests = [harness.submit(name, prompt=12, max_tokens=1) for name in ("b", "c")]
    batch, finished = harness.step()
    assert [(row.session.id, row.start, row.count) for row in batch.rows] == [("b", 8, 4), ("c", 0, 12)]
    assert finished == requests and [request.computed for request in requests] == [4, 12]
    assert harness.kv["m"].pool.used == 7


def test_tokens_are_run_for_their_logits_although_their_kv_is_there() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=12, max_tokens=1)
    harness.step()
    harness.open("b", tokens=9)
    harness.submit("b", prompt=3, max_tokens=0, logits=True, seen_from=9)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].count) == (8, 4)


def edit(number: int, *extents: Extent) -> Edit:
    return Edit(number, (Point("resid", 1),), "scale", extents)


def test_positions_that_an_edit_changes_are_recomputed() -> None:
    harness = Harness()
    session = harness.open("a")
    harness.submit("a", prompt=10, max_tokens=2)
    harness.step()
    harness.step()
    assert session.computed == 11
    harness.scheduler.edit("a", edit(1, Extent(11)))
    assert (session.computed, session.due_from) == (11, 11)
    harness.scheduler.edit("a", edit(2, Extent(5, 6), Extent(8, 9)))
    assert (session.computed, session.due_from) == (5, 5)
    harness.scheduler.end_edits("a", [2], 9)
    assert (session.computed, [each.over for each in session.edits]) == (5, [False, True])
    harness.submit("a", prompt=0, max_tokens=1)
    batch, _ = harness.step()
    assert (batch.rows[0].start, batch.rows[0].end, session.due_from) == (5, 12, FOREVER)
    harness.scheduler.end_edits("a", [1], 12)
    assert (session.computed, session.edits[0].extents) == (12, (Extent(11, 12),))


def test_sessions_share_pages_if_their_tokens_and_edits_are_equal() -> None:
    harness = Harness()
    computed = {}
    for name, edits in {"plain": [], "edited": [edit(1, Extent(9))], "alike": [edit(7, Extent(9))]}.items():
        harness.open(name)
        for each in edits:
            harness.scheduler.edit(name, each)
        request = harness.submit(name, prompt=15, max_tokens=1)
        harness.step()
        computed[name] = request.computed
    assert computed == {"plain": 15, "edited": 7, "alike": 3}
    pages = {name: harness.kv["m"].pages_of(name) for name in computed}
    assert pages["plain"][:2] == pages["edited"][:2] and not set(pages["plain"][2:]) & set(pages["edited"])


def test_a_fork_has_its_parent_s_edits() -> None:
    harness = Harness()
    parent = harness.open("a")
    harness.submit("a", prompt=10, max_tokens=1)
    harness.step()
    harness.scheduler.edit("a", edit(1, Extent(6)))
    harness.scheduler.fork("a", "b", "agent")
    child = harness.scheduler.session("b")
    assert (child.edits, child.due_from, child.computed) == (parent.edits, 6, 6)
    harness.scheduler.end_edits("a", [1], 10)
    assert child.edits == (edit(1, Extent(6)),)


def test_after_a_failed_call_the_next_one_recomputes_edited_positions() -> None:
    harness = Harness()
    session = harness.open("a", tokens=10)
    harness.scheduler.edit("a", edit(1, Extent(3, 4)))
    harness.scheduler.rollback(harness.submit("a", prompt=2).id)
    assert session.due_from == 3
    harness.scheduler.cancel(harness.submit("a", prompt=2).id)
    assert session.due_from == FOREVER


@pytest.mark.parametrize(("prompt", "max_tokens", "seen_from"), [(3, 0, 10), (0, 0, 9), (0, 2, 4), (3, 2, 4)])
def test_positions_to_be_seen_are_run_although_their_kv_is_there(prompt: int, max_tokens: int, seen_from: int) -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", prompt=10, max_tokens=0)
    harness.step()
    request = harness.submit("a", prompt, max_tokens, capture=(Point("resid"),), seen_from=seen_from)
    batch, finished = harness.step()
    assert (batch.rows[0].start, batch.rows[0].end) == (seen_from, 10 + prompt)
    assert request.seen_from == 10 + prompt and finished == ([] if max_tokens else [request])


def test_positions_that_were_seen_need_not_be_run_again() -> None:
    """The session's pages are lost and come back from another session's."""
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", 9, 4, capture=(Point("resid"),), seen_from=0)
    harness.step()
    harness.open("b")
    harness.submit("b", prompt=9, max_tokens=1)
    harness.step()
    harness.scheduler.queues["m"].residency.leave(session, forced=True)
    batch, _ = harness.step()
    assert [(row.start, row.end) for row in batch.rows if row.session is session] == [(8, 11)]
    assert request.seen_from == 11


def test_a_prompt_that_shares_pages_waits_like_any_other_while_pages_are_short() -> None:
    harness = Harness(pages=4)
    harness.open("a")
    harness.open("b")
    harness.submit("a", prompt=14, max_tokens=2)
    harness.step()
    harness.submit("b", prompt=14, max_tokens=1)
    batch, _ = harness.step()
    assert [row.session.id for row in batch.rows] == ["a"]
    assert harness.scheduler.session("b").computed == 0
    batch, _ = harness.step()
    assert [(row.session.id, row.start, row.count) for row in batch.rows] == [("b", 12, 2)]


def test_a_step_that_failed_publishes_nothing() -> None:
    harness = Harness()
    harness.open("a")
    harness.open("b")
    request = harness.submit("a", prompt=12)
    harness.scheduler.next_batch()
    harness.scheduler.rollback(request.id)
    harness.submit("b", prompt=12)
    batch, _ = harness.step()
    assert [(row.session.id, row.start) for row in batch.rows] == [("b", 0)]


# --- waiting sessions -------------------------------------------------------------------------------------------------


def test_no_session_waits_if_all_had_a_row_in_the_last_step() -> None:
    harness = Harness("m", "n")
    harness.open("a")
    harness.open("b", "n")
    assert harness.scheduler.nobody_waits
    first = harness.submit("a", 4)
    assert not harness.scheduler.nobody_waits, "it has had none yet"
    harness.step()
    assert harness.scheduler.nobody_waits
    harness.submit("b", 4)
    assert not harness.scheduler.nobody_waits, "another model's sessions count"
    harness.step()
    assert not harness.scheduler.nobody_waits, "the models take turns: one of them waits"
    harness.scheduler.hold(first.id)
    harness.step()
    assert harness.scheduler.nobody_waits, "a held session waits for its client"


def test_a_session_that_waits_for_room_to_come_back_counts_as_waiting() -> None:
    harness = Harness()
    harness.open("a")
    assert harness.scheduler.nobody_waits
    queue = harness.scheduler.queues["m"]
    queue.awaited["a"] = harness.scheduler.session("a")
    assert not harness.scheduler.nobody_waits


# --- outputs that follow a grammar ----------------------------------------------------------------------------------


def test_a_row_with_a_late_mask_runs_its_last_token_again() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", 6)
    _, finished = harness.step(LATE)
    assert (finished, session.computed, len(session.tokens), request.computed) == ([], 5, 6, 5)
    batch, _ = harness.step(9)
    assert [(row.start, row.count) for row in batch.rows] == [(5, 1)]
    assert (session.tokens[6:], request.computed) == ([9], 6)
    harness.step(LATE)
    assert (session.computed, session.tokens[6:]) == (6, [9])


def guessing(harness: Harness, **more: object) -> tuple[Session, Request, Batch]:
    """Returns a session, its request, and its next step. The step has a guess of one token, 7."""
    session = harness.open("a")
    request = harness.submit("a", 6, may_guess=True, **more)
    harness.step(7)
    batch = harness.scheduler.next_batch()
    assert batch is not None and batch.decode_only is False
    assert [(row.start, row.count, row.guess) for row in batch.rows] == [(6, 2, (7,))]
    return session, request, batch


@pytest.mark.parametrize(("tokens", "computed", "kept"), [((7, 5), 8, 1), ((5,), 7, 0)], ids=["right", "wrong"])
def test_kv_behind_the_last_token_that_is_kept_is_written_again(
    tokens: tuple[int, ...], computed: int, kept: int
) -> None:
    harness = Harness()
    session, request, batch = guessing(harness)
    further = {0: tokens[1:]} if tokens[1:] else {}
    assert harness.scheduler.complete(batch, [tokens[0]], 0.0, further) == []
    harness.scheduler.check_integrity()
    assert (session.tokens[6:], session.computed) == ([7, *tokens], computed)
    assert (request.guessed, request.kept, request.computed) == (1, kept, 6)
    following, _ = harness.step(4)
    assert [(row.start, row.count) for row in following.rows] == [(computed, 1)]


def test_a_guess_that_ends_with_the_last_token_ends_the_request() -> None:
    harness = Harness()
    session, request, batch = guessing(harness, max_tokens=3)
    assert harness.scheduler.complete(batch, [7], 0.0, {0: [5]}) == [request]
    assert (request.finish_reason, session.tokens[6:]) == ("length", [7, 7, 5])
    harness.scheduler.check_integrity()


def test_a_request_whose_guess_spoilt_a_step_goes_on_without_guesses() -> None:
    harness = Harness()
    session, request, batch = guessing(harness)
    assert harness.complete(batch, LATE) == []
    assert (session.computed, len(session.tokens), request.may_guess) == (6, 7, False)
    batch, _ = harness.step(7)
    assert [(row.start, row.count) for row in batch.rows] == [(6, 1)]
    batch, _ = harness.step(7)
    assert [(row.start, row.count) for row in batch.rows] == [(7, 1)]


def test_a_row_with_a_guess_has_no_effect_once_its_request_has_ended() -> None:
    harness = Harness()
    session, request, batch = guessing(harness)
    harness.scheduler.cancel(request.id)
    assert harness.scheduler.complete(batch, [7], 0.0, {0: [5]}) == []
    assert len(session.tokens) == 7


def test_forced_tokens_run_in_one_chunk() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", 4, max_tokens=8)
    harness.step(9)
    assert harness.scheduler.force(request.id, [1, 2, 3]) == ([1, 2, 3], None)
    harness.scheduler.check_integrity()
    batch, _ = harness.step(6)
    assert [(row.start, row.count) for row in batch.rows] == [(4, 4)]
    assert session.tokens[4:] == [9, 1, 2, 3, 6] and request.computed == 4


def test_forced_tokens_end_with_max_tokens_or_a_stop_token() -> None:
    harness = Harness()
    for more, appended, reason in (({}, [1, 2], "length"), ({"stop_tokens": frozenset({1})}, [1], "stop")):
        harness.open(f"s{reason}")
        request = harness.submit(f"s{reason}", 4, max_tokens=3, **more)
        harness.step(9)
        assert harness.scheduler.force(request.id, [1, 2, 3]) == (appended, request)
        assert request.finish_reason == reason
        harness.scheduler.check_integrity()


def test_a_held_request_is_forced_later_and_released_by_each_of_its_holders() -> None:
    harness = Harness()
    harness.open("a")
    request = harness.submit("a", 4)
    harness.step(9)
    harness.scheduler.hold(request.id)
    harness.scheduler.hold(request.id, "grammar")
    assert harness.scheduler.force(request.id, [1]) == ([], None)
    harness.scheduler.release(request.id)
    assert request.state is RequestState.HELD and harness.scheduler.next_batch() is None
    harness.scheduler.release(request.id, "grammar")
    assert harness.scheduler.force(request.id, [1]) == ([1], None)
    harness.scheduler.check_integrity()


# --- steps that follow a step that runs -----------------------------------------------------------------------------


def decoding(harness: Harness, *calls: tuple[str, int]) -> Batch:
    """Opens these sessions with calls of a prompt of 3 tokens and so many generated ones. → their first decode step,
    which runs."""
    for name, max_tokens in calls:
        harness.open(name)
        harness.submit(name, 3, max_tokens)
    harness.step()
    batch = harness.scheduler.next_batch()
    assert batch is not None and batch.decode_only
    return batch


def test_a_step_follows_with_the_sessions_that_do_not_reach_their_last_token() -> None:
    harness = Harness()
    batch = decoding(harness, ("a", 2), ("b", 3), ("c", 9))
    following = harness.scheduler.follow(batch)
    assert following is not None
    assert [(row.session.id, row.start, row.count, row.fed) for row in following.rows] == [
        ("b", 4, 1, 1),
        ("c", 4, 1, 2),
    ]
    assert harness.kv["m"].pages_held("c") == 2, "its fifth token is in another page"
    harness.complete(batch)
    assert harness.scheduler.follow(following) is not None
    harness.complete(following)
    assert harness.scheduler.session("c").tokens == [7, 7, 7, 5, 5, 5]


def test_a_session_that_a_stop_token_ends_has_its_row_in_vain() -> None:
    harness = Harness()
    session = harness.open("a")
    request = harness.submit("a", 3, 9, stop_tokens=frozenset([6]))
    harness.step()
    batch = harness.scheduler.next_batch()
    assert batch is not None
    following = harness.scheduler.follow(batch)
    assert following is not None
    assert harness.complete(batch, 6) == [request] and harness.kv["m"].pages_held("a") == 1
    assert harness.complete(following, 5) == []
    assert session.tokens == [7, 7, 7, 5, 6] and session.computed == 4


def test_no_step_follows_if_a_session_waits_for_a_row() -> None:
    harness = Harness("m", "n")
    batch = decoding(harness, ("a", 9))
    harness.open("b", "n")
    harness.submit("b", 3)
    assert harness.scheduler.follow(batch) is None
    harness.scheduler.close("b")
    assert harness.scheduler.follow(batch) is not None


def test_no_step_follows_a_chunk() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", 3, 9)
    batch = harness.scheduler.next_batch()
    assert batch is not None and harness.scheduler.follow(batch) is None


def test_no_step_follows_where_a_guess_goes_further_than_the_running_step() -> None:
    harness = Harness()
    harness.open("a")
    harness.submit("a", 1, 40, may_guess=True)
    for token in (1, 2, 3, 4, 5, 6, 1, 2):
        harness.step(token)
    batch = harness.scheduler.next_batch()
    assert batch is not None
    following = harness.scheduler.follow(batch)
    assert following is not None, "6 1 2 is new"
    harness.complete(batch, 3)
    assert harness.scheduler.follow(following) is None, "4 5 6 followed 1 2 3"
    harness.complete(following, 4)
    batch = harness.scheduler.next_batch()
    assert batch is not None and batch.rows[0].guess == (5,), "its page has room for one"


def test_no_step_follows_without_pages_for_all_of_its_rows() -> None:
    harness = Harness(pages=3)
    batch = decoding(harness, ("a", 9), ("b", 9))
    assert harness.scheduler.follow(batch) is None and harness.kv["m"].pool.free == 1
    harness.complete(batch)


def test_no_step_follows_if_a_user_with_a_quota_needs_a_page() -> None:
    harness = Harness()
    harness.scheduler.set_tenant(1000, 1.0, 8 << 20)
    batch = decoding(harness, ("a", 9))
    assert harness.scheduler.follow(batch) is None
    harness.complete(batch)
    batch, _ = harness.step()
    batch = harness.scheduler.next_batch()  # type: ignore[assignment]
    assert harness.scheduler.follow(batch) is not None, "it holds the page"
