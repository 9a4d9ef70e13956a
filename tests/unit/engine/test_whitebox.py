"""Edits and captures in a real engine, compared with hooks in transformers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.core.edits import Edit, Extent, cut, ended, now
from djinnd.model.step.graphs import StepGraphs
from djinnd.model.step.shapes import Shape
from djinnd.model.whitebox.probe import INSIDE, Probe
from tests.support import reference
from tests.support.descriptors import open_descriptors
from tests.support.hooked import Hooked
from tests.support.models import reduced_model
from tests.support.whitebox import (
    ATTN,
    EVERY,
    LAST,
    LOGITS,
    MLP,
    NEW,
    NORM,
    RESID,
    an_edit,
    check_a_batch,
    finished,
    near,
    prompt,
    steering,
    values,
)
from tests.support.whitebox import WhiteBoxEngine as Engine

FOLDER = reduced_model("llama-2")


@pytest.fixture
def hooked(shared: Engine) -> Hooked:
    return Hooked(FOLDER)


# --- edits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", EVERY, ids=lambda point: f"{point.where}{point.block}")
def test_a_steered_session_gives_the_tokens_of_hooks(engine: Engine, hooked: Hooked, point: Point) -> None:
    """All tokens: the prompt's in chunks of prefill, and the generated ones."""
    engine.open("s")
    edit = steering(engine, 0, point)
    engine.edit("s", edit)
    found = engine.tokens("s", prompt(150), NEW)
    assert found == hooked.greedy(prompt(150), NEW, [edit])
    assert found != reference.greedy(FOLDER, prompt(150), NEW)
    engine.report()


@pytest.mark.parametrize("op", ["add", "scale", "project_out", "replace", "clamp"])
def test_logits_of_each_op(engine: Engine, hooked: Hooked, op: str) -> None:
    v = None if op == "scale" else values(engine)
    more = {"low": -0.5, "high": 0.25} if op == "clamp" else {"scale": 0.5}
    edit = an_edit(op, [RESID, ATTN], [Extent(5)], v, **more)  # type: ignore[arg-type]
    engine.open("s")
    engine.edit("s", edit)
    _, reply = engine.outcome(engine.run("s", prompt(40), 0, logits=True))
    near(torch.from_numpy(engine.logits(reply)), hooked.run(prompt(40), [edit])[0])


@pytest.mark.parametrize("factor", [1e-18, 1e30])
def test_the_length_of_a_direction_does_not_matter(engine: Engine, hooked: Hooked, factor: float) -> None:
    v, bounds = values(engine), {"low": 2.0, "high": 3.0}
    edit = an_edit("clamp", [RESID], [Extent(0)], factor * v, **bounds)
    engine.open("s")
    engine.edit("s", edit)
    _, reply = engine.outcome(engine.run("s", prompt(20), 0, logits=True))
    expected = an_edit("clamp", [RESID], [Extent(0)], v, **bounds)
    near(torch.from_numpy(engine.logits(reply)), hooked.run(prompt(20), [expected])[0])


def test_rows_of_values_at_certain_positions(engine: Engine, hooked: Hooked) -> None:
    """A patch, in a dtype that is not the model's."""
    patch = values(engine, 3).to(torch.bfloat16)
    edit = an_edit("replace", [RESID, MLP], [Extent(4, 6), Extent(11, 12, 2)], patch)
    engine.open("s")
    engine.edit("s", edit)
    _, reply = engine.outcome(engine.run("s", prompt(40), 0, logits=True))
    near(torch.from_numpy(engine.logits(reply)), hooked.run(prompt(40), [edit])[0])


def test_edits_of_one_position_apply_in_the_order_of_their_numbers(engine: Engine, hooked: Hooked) -> None:
    one = an_edit("replace", [RESID], [Extent(3)], values(engine))
    two = an_edit("scale", [RESID], [Extent(0)], scale=-2.0)
    three = an_edit("add", [RESID], [Extent(6, 9)], values(engine, 3, seed=1))
    engine.open("s")
    engine.edit("s", one, two, three)
    _, reply = engine.outcome(engine.run("s", prompt(20), 0, logits=True))
    near(torch.from_numpy(engine.logits(reply)), hooked.run(prompt(20), [one, two, three])[0])


def test_cached_kv_is_recomputed_where_an_edit_changes_it(engine: Engine, hooked: Hooked) -> None:
    """From the patch on, and not before it. Across pages of 256 tokens."""
    engine.open("s")
    tokens = prompt(300) + engine.tokens("s", prompt(300), NEW)
    edit = an_edit("replace", [RESID], [Extent(260, 261)], values(engine))
    engine.edit("s", edit)
    request = engine.run("s", [], NEW)
    found, reply = engine.outcome(request)
    assert found == hooked.greedy(tokens, NEW, [edit])
    assert isinstance(reply, messages.Finished) and reply.computed == len(tokens) - 260


def test_an_edit_begins_at_the_next_token_and_ends(engine: Engine, hooked: Hooked) -> None:
    engine.open("s")
    tokens = prompt(20) + engine.tokens("s", prompt(20), NEW)
    edit = steering(engine, now(len(tokens)))
    engine.edit("s", edit)
    tokens += (steered := engine.tokens("s", [], NEW))
    assert steered == hooked.greedy(tokens[:-NEW], NEW, [edit])
    engine.end("s", len(tokens), edit)
    (over,) = ended([edit], [edit.number], now(len(tokens)))
    assert engine.tokens("s", [], NEW) == hooked.greedy(tokens, NEW, [over])
    engine.report()


def test_edits_begin_and_end_while_a_session_generates(engine: Engine, hooked: Hooked) -> None:
    """At positions reached in decode, beside sessions that are steered all the time."""
    edits = {
        "a": [an_edit("replace", [RESID], [Extent(24, 26), Extent(29, 30, 2)], values(engine, 3))],
        "b": [steering(engine, 0)],
        "c": [an_edit("scale", [LAST], [Extent(27, 31)], scale=-1.0), steering(engine, 25, ATTN)],
    }
    runs = []
    for seed, (name, some) in enumerate(edits.items()):
        engine.open(name)
        engine.edit(name, *some)
        runs.append(engine.run_message(name, prompt(20, seed), 16))
    engine.send(*runs)
    outcomes = finished(engine, runs)
    for run, some in zip(runs, edits.values(), strict=True):
        assert outcomes[run.request][0] == hooked.greedy(run.tokens, 16, some)


def test_a_truncated_session_stays_edited(engine: Engine, hooked: Hooked) -> None:
    engine.open("s")
    edit = steering(engine, 0)
    engine.edit("s", edit)
    engine.tokens("s", prompt(30), NEW)
    engine.send(messages.Truncate("s", 12))
    assert engine.tokens("s", [7], NEW) == hooked.greedy([*prompt(30)[:12], 7], NEW, cut([edit], 12))


def test_sessions_of_one_batch_have_their_own_edits_and_others_none(engine: Engine, hooked: Hooked) -> None:
    check_a_batch(engine, hooked)


@pytest.mark.parametrize("placing", [Placing(), Placing(resident=1)], ids=["resident", "streamed"])
def test_rows_touched_behind_the_blocks_leave_graphs_to_the_others(
    placing: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are never captured, so each of their steps runs eagerly, in its padded shape."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    replays, passes, inside = [], [], list[bool]()

    class Graphs(StepGraphs):
        def run(self, shape: Shape, logit_rows: int, probe: Probe | None = None, *more: Any) -> Tensor | None:
            points = frozenset[Point]() if probe is None else probe.points
            assert not any(point.is_behind for point in points)
            inside.append(any(point.where in INSIDE for point in points))
            replays.append(shape)
            return super().run(shape, logit_rows, probe, *more)

    with Engine() as engine:
        engine.loaded(FOLDER, placing=placing)
        runner = engine.runner()
        runner.graphs.current = Graphs(runner.model, engine.device, 64, 32, 8, 8 * runner.plan.page_size)  # type: ignore[arg-type]
        runner.graphs.current.stop_capturing()
        forward = runner.model.forward
        monkeypatch.setattr(runner.model, "forward", lambda *args, **more: passes.append(1) or forward(*args, **more))
        check_a_batch(engine, Hooked(FOLDER))
        engine.open("alone")
        engine.tokens("alone", prompt(5), NEW)
        engine.check_idle()
        steps = engine.report().steps
    assert len(passes) == steps if placing.resident else len(passes) > steps, "a pass costs the bus where blocks stream"
    assert replays and any(inside) != bool(placing.resident), "who is touched within blocks is with the others"


def test_pages_are_shared_up_to_the_first_edit_and_between_equal_edits(engine: Engine, hooked: Hooked) -> None:
    tokens = prompt(600)
    edit = an_edit("replace", [RESID], [Extent(300, 301)], values(engine))
    computed = {}
    for name, edits in {"plain": [], "edited": [edit], "alike": [edit], "otherwise": [steering(engine, 300)]}.items():
        engine.open(name)
        engine.edit(name, *edits)
        found, reply = engine.outcome(engine.run(name, tokens, NEW))
        assert found == hooked.greedy(tokens, NEW, edits)
        assert isinstance(reply, messages.Finished)
        computed[name] = reply.computed
    assert computed == {"plain": 600, "edited": 344, "alike": 88, "otherwise": 344}


def test_a_fork_has_its_parent_s_edits_and_may_get_others(engine: Engine, hooked: Hooked) -> None:
    engine.open("s")
    edit = steering(engine, 0)
    engine.edit("s", edit)
    tokens = prompt(30) + engine.tokens("s", prompt(30), NEW)
    engine.send(messages.Fork("t", "s", "agent"))
    more = an_edit("replace", [RESID], [Extent(8, 9)], values(engine, seed=3))
    engine.edit("t", more)
    assert engine.tokens("s", [], NEW) == hooked.greedy(tokens, NEW, [edit])
    assert engine.tokens("t", [], NEW) == hooked.greedy(tokens, NEW, [edit, more])
    engine.send(messages.Close("s"))
    assert engine.tokens("t", [7], 1)
    engine.send(messages.Close("t"))


def test_a_session_of_an_earlier_engine_keeps_its_edits(engine: Engine, hooked: Hooked) -> None:
    edit = steering(engine, 4)
    engine.send(messages.Open("s", "m", engine.tenant, "agent", prompt(40), edits=(edit,)))
    assert engine.tokens("s", [], NEW) == hooked.greedy(prompt(40), NEW, [edit])


def test_pages_taken_by_others_are_recomputed_with_the_edits() -> None:
    """The pool has room for 512 tokens and a few more."""
    with Engine() as engine:
        engine.loaded(FOLDER, kv_bytes=1)
        hooked, edit = Hooked(FOLDER), steering(engine, 100)
        engine.open("s")
        engine.edit("s", edit)
        tokens = prompt(300) + engine.tokens("s", prompt(300), NEW)
        engine.open("u")
        engine.outcome(engine.run("u", prompt(500, seed=3), 0, logits=True))  # takes all pages
        found, reply = engine.outcome(engine.run("s", [], NEW))
        assert found == hooked.greedy(tokens, NEW, [edit])
        assert isinstance(reply, messages.Finished) and reply.computed == len(tokens)


def test_edited_pages_come_back_from_the_host_unchanged() -> None:
    with Engine() as engine:
        engine.loaded(FOLDER, host_kv_bytes=64 << 20)
        engine.send(engine.grant(engine.until(messages.NeedArena)))
        hooked, edit = Hooked(FOLDER), steering(engine, 100)
        engine.open("s")
        engine.edit("s", edit)
        tokens = prompt(300) + engine.tokens("s", prompt(300), NEW)
        engine.send(messages.Pause(engine.number(), "s", "host"))
        engine.until(messages.Paused)
        engine.edit("s", later := steering(engine, 290, seed=4))
        engine.send(messages.Resume("s"))
        found, reply = engine.outcome(engine.run("s", [], NEW))
        assert found == hooked.greedy(tokens, NEW, [edit, later])
        assert isinstance(reply, messages.Finished) and reply.computed <= len(tokens) - 256


def test_values_without_room_on_the_device_fail_the_run(engine: Engine) -> None:
    free = engine.report()
    rows = (free.budget_bytes - free.used_bytes) // (4 * engine.points.width) + 1
    engine.open("s")
    engine.open("t")
    vast = Edit(1 << 30, (RESID,), "replace", (Extent(0, rows),), rows=rows, values=b"")
    runner = engine.runner()
    engine.send(messages.AddEdit("s", vast))
    tokens, reply = engine.outcome(engine.run("s", prompt(10), NEW))
    assert tokens == [] and isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    assert reply.data["needed"] > free.budget_bytes - free.used_bytes
    assert runner.probes.edits.nbytes == 0
    assert engine.tokens("t", prompt(10), NEW) == reference.greedy(FOLDER, prompt(10), NEW)
    engine.send(messages.EndEdits("s", [vast.number], 0))
    assert engine.tokens("s", prompt(10), NEW) == reference.greedy(FOLDER, prompt(10), NEW)


def test_edits_of_idle_sessions_make_room_for_others(engine: Engine, hooked: Hooked) -> None:
    """Two sessions alternate, without room for the edits of both. Their values come back with the next run."""
    room, budget = 1 << 20, engine.device.budget
    budget.reserve("something else", budget.free - room)
    rows = room * 3 // 5 // (4 * engine.points.width)
    edits = {name: an_edit("add", [RESID], [Extent(0, rows)], values(engine, rows, i)) for i, name in enumerate("st")}
    for name, edit in edits.items():
        engine.open(name)
        engine.edit(name, edit)
    for name in "stst":
        engine.send(messages.Truncate(name, 0))
        assert engine.tokens(name, prompt(10), 2) == hooked.greedy(prompt(10), 2, [edits[name]])
    budget.release("something else")


# --- captures -------------------------------------------------------------------------------------------------------


def test_a_capture_equals_the_activations_that_hooks_see(engine: Engine, hooked: Hooked) -> None:
    """The prompt's positions, in chunks, and the generated ones, except the last."""
    engine.open("s")
    found, reply = engine.outcome(engine.run("s", prompt(150), NEW, capture=EVERY))
    first, seen = engine.captured(reply, EVERY)
    tokens = prompt(150) + found
    assert found == reference.greedy(FOLDER, prompt(150), NEW) and first == 0
    expected = hooked.run(tokens[:-1], seen=EVERY)[1]
    for point in EVERY:
        assert len(seen[point]) == 150 + NEW - 1
        near(seen[point], expected[point])
    engine.report()


@pytest.mark.parametrize("points", [[RESID], [LOGITS], [LAST, NORM]], ids=["resid", "logits", "both"])
def test_a_prompt_is_captured_without_generation(engine: Engine, hooked: Hooked, points: list[Point]) -> None:
    engine.open("s")
    engine.tokens("s", prompt(20), NEW)
    engine.send(messages.Truncate("s", 20))
    tokens, reply = engine.outcome(engine.run("s", prompt(300, seed=1), 0, capture=points))
    first, seen = engine.captured(reply, points)
    assert tokens == [] and first == 20 and reply.generated == 0  # type: ignore[union-attr]
    expected = hooked.run(prompt(20) + prompt(300, seed=1), seen=points)[1]
    for point in points:
        near(seen[point], expected[point][20:])


def test_without_a_prompt_captures_begin_at_the_last_token(engine: Engine, hooked: Hooked) -> None:
    engine.open("s")
    tokens = prompt(20) + engine.tokens("s", prompt(20), NEW)
    for count in (0, 3):
        found, reply = engine.outcome(engine.run("s", [], count, capture=[RESID]))
        first, seen = engine.captured(reply, [RESID])
        assert first == len(tokens) - 1
        tokens += found
        near(seen[RESID], hooked.run(tokens, seen=[RESID])[1][RESID][first : len(tokens) - bool(count)])


def test_a_capture_begins_at_the_first_edit_and_includes_it(engine: Engine, hooked: Hooked) -> None:
    """Also in the second of two forks, although the first has computed the same positions."""
    engine.open("s")
    engine.tokens("s", prompt(300), NEW)
    engine.send(messages.Truncate("s", 300))
    edit = an_edit("replace", [RESID], [Extent(270, 272)], values(engine, 2))
    engine.edit("s", edit)
    engine.send(messages.Fork("t", "s", "agent"))
    for name in ("s", "t"):
        tokens, reply = engine.outcome(engine.run(name, [7], 2, capture=EVERY))
        first, seen = engine.captured(reply, EVERY)
        assert first == 270
        expected = hooked.run([*prompt(300), 7, tokens[0]], [edit], EVERY)[1]
        for point in EVERY:
            near(seen[point], expected[point][270:])


def test_shared_pages_are_recomputed_to_be_captured(engine: Engine, hooked: Hooked) -> None:
    for name in ("s", "t"):
        engine.open(name)
    engine.tokens("s", prompt(300), NEW)
    _, reply = engine.outcome(engine.run("t", prompt(300), 1, capture=[RESID]))
    first, seen = engine.captured(reply, [RESID])
    assert first == 0
    near(seen[RESID], hooked.run(prompt(300), seen=[RESID])[1][RESID])


def test_many_requests_are_captured_together(engine: Engine, hooked: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    """In windows of many pieces, beside a session that is not captured."""
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 4096)
    points = [[RESID], [ATTN, LOGITS], [NORM, LAST, MLP], []]
    runs = []
    for index, some in enumerate(points):
        engine.open(str(index))
        runs.append(engine.run_message(str(index), prompt(20 + 9 * index, seed=index), 9 - index, capture=some))
    engine.send(*runs)
    outcomes = finished(engine, runs)
    for run in runs:
        tokens, seen = outcomes[run.request]
        assert tokens == reference.greedy(FOLDER, run.tokens, run.max_tokens)
        expected = hooked.run(run.tokens + tokens[:-1], seen=run.capture)[1]
        for point in run.capture:
            near(seen[point], expected[point])


def test_pages_lost_during_a_capture_leave_no_gap(hooked: Hooked) -> None:
    """Two sessions need more pages than exist. They alternate, and both capture everything."""
    with Engine() as engine:
        engine.loaded(FOLDER, kv_bytes=1)
        for name in ("s", "t"):
            engine.open(name)
        runs = [engine.run_message(name, prompt(250, seed=i), 12, capture=[RESID]) for i, name in enumerate("st")]
        engine.send(*runs)
        outcomes = finished(engine, runs)
        for run in runs:
            tokens, seen = outcomes[run.request]
            near(seen[RESID], hooked.run(run.tokens + tokens[:-1], seen=[RESID])[1][RESID])


def test_a_cancelled_capture_is_answered_without_activations(engine: Engine) -> None:
    engine.open("s")
    request = engine.run("s", prompt(100), 1000, capture=[RESID])
    engine.until(messages.Stepped)
    engine.send(messages.CancelRun(request))
    _, reply = engine.outcome(request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled" and reply.capture is None


def test_a_halted_capture_has_the_positions_that_stay(engine: Engine, hooked: Hooked) -> None:
    engine.open("s")
    request = engine.run("s", prompt(30), 1000, capture=[RESID])
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [token.token for token in engine.until(messages.Stepped).tokens]
    engine.send(messages.Halt(request, 2))
    _, reply = engine.outcome(request)
    _, seen = engine.captured(reply, [RESID])
    assert isinstance(reply, messages.Finished) and (reply.length, reply.generated) == (32, 2)
    near(seen[RESID], hooked.run(prompt(30) + tokens[:1], seen=[RESID])[1][RESID])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_session_closed_in_capture_gets_one_reply(engine: Engine, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 4096)
    engine.open("s")
    run = engine.run_message("s", prompt(100), 1 if when == "meanwhile" else 1000, capture=EVERY)
    engine.send(run)
    engine.until(messages.Stepped)
    engine.send(messages.Close("s"))
    _, reply = engine.outcome(run.request)
    assert isinstance(reply, messages.Finished) and reply.reason in ("cancelled", "length")
    assert engine.report().sessions == []


def test_no_window_is_leaked(engine: Engine) -> None:
    engine.open("s")
    engine.tokens("s", prompt(30), NEW)
    before = open_descriptors()
    for _ in range(3):
        _, reply = engine.outcome(engine.run("s", [7], 2, capture=EVERY))
        engine.captured(reply, EVERY)
        os.close(engine.descriptors.pop())
        request = engine.run("s", [7], 1000, capture=EVERY)
        engine.send(messages.CancelRun(request))
        engine.outcome(request)
        engine.report()
    engine.end_background_work()
    assert open_descriptors() == before


def test_a_host_without_memory_for_a_window_fails_the_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise OSError(28, "No space left on device")

    engine.open("s")
    told = prompt(30) + engine.tokens("s", prompt(30), NEW)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuses)
        for count in (1, 40):
            _, reply = engine.outcome(engine.run("s", [7], count, capture=[RESID]))
            assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    assert engine.tokens("s", [7], NEW) == reference.greedy(FOLDER, [*told, 7], NEW)


def test_a_device_without_room_for_captures_fails_the_call(engine: Engine) -> None:
    report = engine.report()
    row = 4 * engine.points.vocab
    engine.open("s")
    runner = engine.runner()
    blocker = runner.device.allocate("blocker", (report.budget_bytes - report.used_bytes - 50 * row,), torch.uint8)
    _, reply = engine.outcome(engine.run("s", prompt(60), 4, capture=[LOGITS]))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory" and reply.data["needed"] >= 63 * row
    del blocker
    runner.device.release("blocker")
    assert engine.tokens("s", prompt(60), 4, capture=[LOGITS]) == reference.greedy(FOLDER, prompt(60), 4)


def test_an_unloaded_model_frees_edits_and_captures() -> None:
    with Engine() as engine:
        engine.loaded(FOLDER)
        engine.open("s")
        engine.edit("s", steering(engine, 0))
        engine.tokens("s", prompt(30), NEW, capture=[RESID])
        number = engine.number()
        engine.send(messages.Close("s"), messages.Unload(number, "m"))
        assert engine.until(messages.Unloaded).request == number
        assert engine.report().used_bytes == 0


def test_the_budget_may_change_while_sessions_are_edited() -> None:
    """Memory of edits counts in the budget, and stays."""
    with Engine() as engine:
        engine.loaded(FOLDER)
        hooked, patch = Hooked(FOLDER), values(engine, 5000)
        edit = an_edit("replace", [RESID], [Extent(3, 5003)], 0.1 * patch)
        engine.open("s")
        engine.edit("s", edit)
        tokens = prompt(20) + engine.tokens("s", prompt(20), NEW)
        engine.send(messages.SetBudget(engine.number(), 1))
        refused = engine.until(messages.Failed)
        assert refused.data["needed"] > 4 * 5000 * engine.points.width
        for budget in (refused.data["needed"], engine.report().budget_bytes):
            engine.send(messages.SetBudget(engine.number(), budget))
            assert engine.until(messages.BudgetSet).used_bytes <= budget
            tokens += engine.tokens("s", [], NEW)
        assert tokens[20:] == hooked.greedy(prompt(20), 3 * NEW, [edit])
        engine.check_idle()
