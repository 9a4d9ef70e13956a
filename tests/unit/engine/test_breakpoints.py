"""Runs of a real engine that stop inside the model and go on, compared with runs without breakpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.core.edits import FOREVER, Edit, Extent
from djinnd.core.stops import Stop
from djinnd.engine.probes.device_rows import DeviceRows
from djinnd.engine.probes.parked_states import ParkedStates
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.model.step.graphs import StepGraphs
from tests.support import reference
from tests.support.hooked import Hooked
from tests.support.models import reduced_model
from tests.support.parameters import FEW_FAMILIES
from tests.support.whitebox import NEW, an_edit, near, prompt, steering, values
from tests.support.whitebox import WhiteBoxEngine as Engine

FOLDER = reduced_model("llama-2")
BLOCKS = 4
EVERY = range(BLOCKS + 1)  # boundaries of blocks
LONG = 150  # prompt tokens: three chunks


BOTH = pytest.mark.parametrize("shared", ["llama-2", "qwen3-moe"], indirect=True)


@pytest.fixture
def alone() -> Iterator[Engine]:
    """An engine that is not shared, with room for 512 tokens and a few more."""
    with Engine() as engine:
        engine.loaded(FOLDER, kv_bytes=1)
        yield engine


def greedy(engine: Engine, tokens: list[int], count: int) -> list[int]:
    return reference.greedy(reduced_model(engine.family), tokens, count)


def hooked(engine: Engine) -> Hooked:
    return Hooked(reduced_model(engine.family))


def runner_of(engine: Engine) -> ModelRunner:
    return engine.runner()


class At(NamedTuple):
    """A breakpoint before a block, at positions in any of these ranges."""

    block: int
    spans: tuple[tuple[int, int], ...]


def at(block: int, *spans: tuple[int, int]) -> At:
    return At(block, spans or ((0, FOREVER),))


def stops(*ats: At, last: messages.Finished | None = None) -> list[Stop]:
    """The stops of a call, or of a call that resumes from `last`."""
    found = []
    for block, spans in ats:
        first = 0
        if last is not None:
            assert last.stopped is not None and last.capture is not None
            first = last.length if block <= last.stopped else last.capture.first
        starts = [max(start, first) for start, end in spans if end > first]
        found += [Stop(block, min(starts))] if starts else []
    return found


class Hit:
    def __init__(self, engine: Engine, tokens: list[int], reply: messages.FromEngine) -> None:
        assert isinstance(reply, messages.Finished) and reply.stopped is not None, reply
        assert reply.reason == "breakpoint" and reply.generated == len(tokens)
        self.reply, self.tokens, self.block = reply, tokens, reply.stopped
        point = Point("resid", self.block)
        self.first, seen = engine.captured(reply, [point])
        self.activation = seen[point]
        assert self.first + len(self.activation) == reply.length

    def replaced(self, activation: Tensor) -> Edit:
        extent = Extent(self.first, self.first + len(activation))
        return an_edit("replace", [Point("resid", self.block)], [extent], activation)


def hit(engine: Engine, session: str, tokens: list[int], count: int, *ats: At, resume: Hit | None = None) -> Hit:
    return Hit(engine, *engine.outcome(start(engine, session, tokens, count, *ats, resume=resume)))


def start(engine: Engine, session: str, tokens: list[int], count: int, *ats: At, resume: Hit | None = None) -> int:
    """The number of the submitted request."""
    if resume is None:
        return engine.run(session, tokens, count, stops=stops(*ats))
    return engine.run(session, tokens, count, stops=stops(*ats, last=resume.reply), resume_block=resume.block)


def resumed(engine: Engine, session: str, hit: Hit, count: int, *ats: At) -> list[int]:
    """The tokens of the session after it is resumed to its end."""
    tokens, reply = engine.outcome(start(engine, session, [], count, *ats, resume=hit))
    assert isinstance(reply, messages.Finished) and reply.reason == "length" and reply.capture is None, reply
    return tokens


def to_the_end(
    engine: Engine, session: str, tokens: list[int], count: int, *ats: At, last: Hit | None = None
) -> tuple[list[int], list[Hit]]:
    """Runs through all hits without changing them, from `last` on."""
    told: list[int] = []
    hits: list[Hit] = []
    while True:
        some, reply = engine.outcome(start(engine, session, tokens, count - len(told), *ats, resume=last))
        told, tokens = told + some, []
        assert isinstance(reply, messages.Finished)
        if reply.stopped is None:
            return told, hits
        last = Hit(engine, some, reply)
        hits.append(last)


@contextmanager
def in_chunk(engine: Engine, number: int, message: messages.ToEngine) -> Iterator[None]:
    """Sends the engine a message while it computes that chunk of a prompt."""
    chunks = count(1)

    def send(*_: object) -> None:
        if next(chunks) == number:
            engine.send(message)

    handle = runner_of(engine).model.adapter.blocks[0].register_forward_hook(send)
    yield
    handle.remove()
    assert next(chunks) > number


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """Counts how often each block runs."""
    counts = [0] * BLOCKS

    def note(index: int) -> None:
        counts[index] += 1

    blocks = runner_of(engine).model.adapter.blocks
    handles = [block.register_forward_hook(lambda *_, i=i: note(i)) for i, block in enumerate(blocks)]
    yield counts
    for handle in handles:
        handle.remove()


# --- without edits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", EVERY)
def test_a_prompt_stops_and_goes_on(engine: Engine, block: int) -> None:
    """In chunks. The activations at the breakpoint equal those of a capture without one, bit for bit, and so do the
    tokens."""
    engine.open("s")
    found = hit(engine, "s", prompt(LONG), NEW, at(block))
    assert (found.block, found.first, found.tokens, found.reply.length) == (block, 0, [], LONG)
    told = resumed(engine, "s", found, NEW, at(block, (0, LONG)))
    assert told == greedy(engine, prompt(LONG), NEW)
    engine.tenant += 1
    engine.open("t")
    point = Point("resid", block)
    _, reply = engine.outcome(engine.run("t", prompt(LONG), 1, capture=[point]))
    assert torch.equal(found.activation, engine.captured(reply, [point])[1][point])
    engine.report()


@pytest.mark.parametrize("block", EVERY)
def test_each_generated_token_stops(engine: Engine, block: int) -> None:
    engine.open("s")
    told, hits = to_the_end(engine, "s", prompt(20), NEW, at(block, (20, FOREVER)))
    assert told == greedy(engine, prompt(20), NEW)
    assert [(each.first, len(each.activation)) for each in hits] == [(20 + i, 1) for i in range(NEW - 1)]
    engine.tenant += 1
    engine.open("t")
    point = Point("resid", block)
    _, reply = engine.outcome(engine.run("t", prompt(20), NEW, capture=[point]))
    expected = engine.captured(reply, [point])[1][point]
    assert torch.equal(torch.cat([each.activation for each in hits]), expected[20:])


def test_prefill_speed_is_not_learnt_from_steps_whose_end_was_not_observed(alone: Engine) -> None:
    """Such as steps of rows that have stopped, or of a call that only captures: the next step may come much later."""
    costs = alone.scheduler.queues["m"].residency.lower_tiers.costs
    alone.open("s")
    found = hit(alone, "s", prompt(LONG), 1, at(BLOCKS))
    resumed(alone, "s", found, 1, at(BLOCKS, (0, LONG)))
    assert costs.prefill == 0
    alone.open("t")
    alone.outcome(alone.run("t", prompt(LONG, 1), 0, capture=[Point("resid", 1)]))
    alone.outcome(alone.run("t", [], 1))
    assert costs.prefill == 0
    alone.open("u")
    alone.outcome(alone.run("u", prompt(LONG, 2), 1))
    assert costs.prefill > 0


@BOTH
def test_a_run_stops_at_every_boundary_in_turn(engine: Engine) -> None:
    """In the prompt, and again at the third generated token."""
    engine.open("s")
    told, hits = to_the_end(engine, "s", prompt(100), NEW, *(at(block, (0, 100), (102, 103)) for block in EVERY))
    assert told == greedy(engine, prompt(100), NEW)
    assert [(each.block, each.first) for each in hits] == [(b, 0) for b in EVERY] + [(b, 102) for b in EVERY]


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_family_stops_everywhere(family: str) -> None:
    """The activations at the breakpoint equal those of a capture without one, bit for bit."""
    points = [Point("resid", block) for block in EVERY]
    with Engine() as engine:
        engine.loaded(reduced_model(family))
        engine.open("t")
        expected, reply = engine.outcome(engine.run("t", prompt(20), 2, capture=points))
        seen = engine.captured(reply, points)[1]
        engine.tenant += 1
        engine.open("s")
        told, hits = to_the_end(engine, "s", prompt(20), 2, *(at(block) for block in EVERY))
        assert told == expected and [each.block for each in hits] == 2 * list(EVERY)
        for block in EVERY:
            found = torch.cat([each.activation for each in hits if each.block == block])
            assert torch.equal(found, seen[points[block]])
        engine.check_idle()


def test_a_breakpoint_at_middle_positions_stops_all_positions_behind_them(engine: Engine) -> None:
    engine.open("s")
    found = hit(engine, "s", prompt(LONG), NEW, at(2, (90, 91)))
    assert found.first == 90
    later = hit(engine, "s", [], NEW, at(3, (120, 130)), resume=found)
    assert later.first == 120 and later.block == 3
    near(
        torch.cat([found.activation, later.activation]),
        torch.cat(
            [
                hooked(engine).run(prompt(LONG), seen=[Point("resid", b)])[1][Point("resid", b)][f:]
                for b, f in ((2, 90), (3, 120))
            ]
        ),
    )
    assert resumed(engine, "s", later, NEW) == greedy(engine, prompt(LONG), NEW)


@pytest.mark.parametrize("block", [0, 2, BLOCKS])
def test_resuming_runs_only_the_blocks_behind_the_stop(engine: Engine, block: int) -> None:
    engine.open("s")
    with counted(engine) as counts:
        found = hit(engine, "s", prompt(LONG), 1, at(block))
    chunks = max(counts)
    assert counts == [chunks if index < block else 0 for index in range(BLOCKS)]
    with counted(engine) as counts:
        resumed(engine, "s", found, 1)
    assert max(counts) == counts[-1] and counts == [counts[-1] if index >= block else 0 for index in range(BLOCKS)]


@BOTH
def test_a_session_that_stops_does_not_change_others_in_the_batch(engine: Engine) -> None:
    """The others decode and read prompts in the same steps."""
    others = {name: prompt(length, seed) for seed, (name, length) in enumerate({"a": 9, "b": 130, "c": 40}.items(), 7)}
    for name in (*others, "s"):
        engine.open(name)
    runs = [engine.run_message(name, tokens, 40) for name, tokens in others.items()]
    ats = at(1, (0, 100)), at(3, (0, 100))
    first = engine.run_message("s", prompt(100), NEW, stops=stops(*ats))
    engine.send(*runs, first)
    told: dict[int, list[int]] = {}
    ended: dict[int, messages.FromEngine] = {}
    mine, request = [], first.request
    while len(ended) < len(runs) + 1:
        message = engine.receive()
        if isinstance(message, messages.Stepped):
            for token in message.tokens:
                told.setdefault(token.request, []).append(token.token)
            continue
        assert isinstance(message, messages.Finished), message
        if message.request == request and message.stopped is not None:
            mine.append(message.stopped)
            due = stops(*ats, last=message)
            request = engine.run("s", [], NEW, stops=due, resume_block=message.stopped)
        else:
            ended[message.request] = message
    assert mine == [1, 3] and told[request] == greedy(engine, prompt(100), NEW)
    for run in runs:
        assert told[run.request] == greedy(engine, run.tokens, 40)


@BOTH
def test_many_sessions_stop_in_the_same_steps_at_several_boundaries(engine: Engine) -> None:
    names = [f"s{index}" for index in range(7)]
    ats = {name: at(index % (BLOCKS + 1), (0, 15 + index), (17 + index, FOREVER)) for index, name in enumerate(names)}
    prompts = {name: prompt(15 + index, index) for index, name in enumerate(names)}
    told: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        engine.open(name)
    sent = {name: engine.run_message(name, prompts[name], NEW, stops=stops(ats[name])) for name in names}
    engine.send(*sent.values())
    owner = {run.request: name for name, run in sent.items()}
    hits, left = 0, len(names)
    while left:
        message = engine.receive()
        if isinstance(message, messages.Stepped):
            for token in message.tokens:
                told[owner[token.request]].append(token.token)
            continue
        assert isinstance(message, messages.Finished), message
        name = owner[message.request]
        if message.stopped is None:
            left -= 1
            continue
        hits += 1
        left_over = NEW - len(told[name])
        due = stops(ats[name], last=message)
        owner[engine.run(name, [], left_over, stops=due, resume_block=message.stopped)] = name
    assert hits == len(names) * (1 + NEW - 3)
    for name, tokens in prompts.items():
        assert told[name] == greedy(engine, tokens, NEW)


# --- with edits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", EVERY)
def test_an_edit_at_a_hit_equals_the_same_edit_without_a_breakpoint(engine: Engine, block: int) -> None:
    engine.open("s")
    found = hit(engine, "s", prompt(LONG), NEW, at(block))
    changed = found.activation.clone()
    changed[-3:] *= -0.5
    engine.edit("s", edit := found.replaced(changed))
    told = resumed(engine, "s", found, NEW, at(block, (0, LONG)))
    assert told == hooked(engine).greedy(prompt(LONG), NEW, [edit])
    assert told != greedy(engine, prompt(LONG), NEW)
    engine.open("t")
    engine.edit("t", edit)
    assert engine.tokens("t", prompt(LONG), NEW) == told


def test_a_decode_token_is_edited_at_a_hit(engine: Engine) -> None:
    engine.open("s")
    found = hit(engine, "s", prompt(20), NEW, at(3, (22, 23)))
    assert found.first == 22 and len(found.tokens) == 3
    engine.edit("s", edit := found.replaced(values(engine, 1)))
    told = found.tokens + resumed(engine, "s", found, NEW - 3, at(3, (22, 23)))
    assert told == hooked(engine).greedy(prompt(20), NEW, [edit])


def test_a_hit_can_be_resumed_again_and_again(engine: Engine) -> None:
    """The stage is gone after the first time. Each time has another edit."""
    engine.open("s")
    found = hit(engine, "s", prompt(40), NEW, at(2))
    for scale in (-1.0, 0.25, 1.0):
        engine.edit("s", edit := found.replaced(scale * found.activation))
        expected = hooked(engine).greedy(prompt(40), NEW, [edit])
        assert resumed(engine, "s", found, NEW, at(2, (0, 40))) == expected
        engine.send(messages.Truncate("s", 40))
        engine.end("s", 1, edit)
    assert expected == greedy(engine, prompt(40), NEW), "the last edit puts back what was there"


@pytest.mark.parametrize("block", [1, 2, 3])
def test_steering_at_a_breakpoint_applies_once(engine: Engine, block: int) -> None:
    """The edit shows in the captured activations."""
    point = Point("resid", block)
    edit = steering(engine, 0, point)
    engine.open("s")
    engine.edit("s", edit)
    found = hit(engine, "s", prompt(100), NEW, at(block))
    near(found.activation, hooked(engine).run(prompt(100), [edit], [point])[1][point])
    assert resumed(engine, "s", found, NEW) == hooked(engine).greedy(prompt(100), NEW, [edit])


def test_steering_inside_blocks_before_and_behind_a_stop(engine: Engine) -> None:
    edits = [steering(engine, 0, Point("attn", 0)), steering(engine, 3, Point("mlp", 3), seed=1)]
    engine.open("s")
    engine.edit("s", *edits)
    found = hit(engine, "s", prompt(100), NEW, at(2))
    assert resumed(engine, "s", found, NEW) == hooked(engine).greedy(prompt(100), NEW, edits)


# --- parked rows are lost
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edited", [False, True])
def test_pages_taken_by_others_during_a_stop_are_recomputed(alone: Engine, edited: bool) -> None:
    engine = alone
    engine.open("s")
    found = hit(engine, "s", prompt(300), NEW, at(2))
    parked = runner_of(engine).probes.parked
    assert len(parked) == 1
    engine.open("u")
    engine.outcome(engine.run("u", prompt(500, seed=3), 0, logits=True))  # takes all pages
    engine.report()
    assert len(parked) == 0
    edits = [found.replaced(-found.activation)] if edited else []
    engine.edit("s", *edits)
    assert resumed(engine, "s", found, NEW, at(2, (0, 300))) == hooked(engine).greedy(prompt(300), NEW, edits)


def test_pages_moved_to_the_host_during_a_stop_come_back() -> None:
    with Engine() as engine:
        engine.loaded(FOLDER, host_kv_bytes=64 << 20)
        engine.send(engine.grant(engine.until(messages.NeedArena)))
        engine.open("s")
        found = hit(engine, "s", prompt(300), NEW, at(2))
        engine.edit("s", edit := found.replaced(-found.activation))
        engine.send(messages.Pause(engine.number(), "s", "host"))
        engine.until(messages.Paused)
        engine.send(messages.Resume("s"))
        told = resumed(engine, "s", found, NEW, at(2, (0, 300)))
        assert told == hooked(engine).greedy(prompt(300), NEW, [edit])
        engine.report()


def test_a_host_without_memory_for_captures_fails_the_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is as it was before the call, which may be repeated."""

    def refuses(*args: object) -> None:
        raise OSError(28, "No space left on device")

    engine.open("s")
    engine.tokens("s", prompt(30), 1)
    engine.send(messages.Truncate("s", 30))
    for stop in (at(2), at(3)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", refuses)
            _, reply = engine.outcome(engine.run("s", prompt(LONG, seed=1), NEW, stops=stops(stop)))
        assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    tokens = prompt(30) + prompt(LONG, seed=1)
    assert engine.tokens("s", tokens[30:], NEW) == greedy(engine, tokens, NEW)


def test_two_stopping_sessions_that_need_more_pages_than_exist_both_finish(alone: Engine) -> None:
    """Each stops, and loses its pages to the other."""
    engine = alone
    prompts = {"s": prompt(400, seed=1), "t": prompt(400, seed=2)}
    hits = {}
    for name, tokens in prompts.items():
        engine.open(name)
        hits[name] = hit(engine, name, tokens, NEW, at(3))
    for name, tokens in prompts.items():
        assert resumed(engine, name, hits[name], NEW) == greedy(engine, tokens, NEW)


def test_a_device_without_room_for_held_rows_recomputes_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens and the captured activations are the same."""
    monkeypatch.setattr(ParkedStates, "give_room", lambda parked, row: False)
    engine.open("s")
    found = hit(engine, "s", prompt(LONG), NEW, at(2))
    with counted(engine) as counts:
        assert resumed(engine, "s", found, 1, at(2, (0, LONG))) == greedy(engine, prompt(LONG), 1)
    assert min(counts) == max(counts) > 0


def test_a_device_without_room_for_captures_fails_the_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(rows: DeviceRows, count: int) -> int:
        raise OutOfMemory("no room", needed=count)

    engine.open("s")
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRows, "take", refuses)
        _, reply = engine.outcome(engine.run("s", prompt(LONG), NEW, stops=stops(at(2))))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    assert engine.tokens("s", prompt(LONG), NEW) == greedy(engine, prompt(LONG), NEW)


@pytest.mark.parametrize("stopping", [False, True])
def test_held_rows_are_dropped_to_make_room_for_other_sessions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    """For another session's captures, or for its activations at a breakpoint."""
    engine.open("s")
    engine.open("t")
    found = hit(engine, "s", prompt(LONG), NEW, at(2))
    parked = runner_of(engine).probes.parked
    assert len(parked) == 1

    def refuses(rows: DeviceRows, count: int) -> int:
        if len(parked):
            raise OutOfMemory("no room", needed=count)
        return take(rows, count)

    take = DeviceRows.take
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRows, "take", refuses)
        if stopping:
            assert len(hit(engine, "t", prompt(40, seed=1), NEW, at(BLOCKS)).activation) == 40
        else:
            _, reply = engine.outcome(engine.run("t", prompt(40, seed=1), 1, capture=[Point("resid", 2)]))
            assert len(engine.captured(reply, [Point("resid", 2)])[1][Point("resid", 2)]) == 40
    assert resumed(engine, "s", found, NEW) == greedy(engine, prompt(LONG), NEW)


def test_a_load_drops_the_held_rows_of_idle_sessions(alone: Engine) -> None:
    engine = alone
    engine.open("s")
    found = hit(engine, "s", prompt(100), NEW, at(2))
    engine.loaded(FOLDER, "n", kv_bytes=1)
    assert runner_of(engine).probes.parked.nbytes == 0
    assert resumed(engine, "s", found, NEW) == greedy(engine, prompt(100), NEW)


def test_a_capture_after_a_hit_includes_the_positions_that_had_stopped(engine: Engine) -> None:
    """The call computes these positions, which have not run all blocks yet."""
    engine.open("s")
    hit(engine, "s", prompt(40), NEW, at(2, (30, 31)))
    _, reply = engine.outcome(engine.run("s", prompt(5, seed=1), 1, capture=[Point("resid", 3)]))
    first, seen = engine.captured(reply, [Point("resid", 3)])
    assert (first, len(seen[Point("resid", 3)])) == (30, 15)


def test_the_budget_may_change_during_a_stop(alone: Engine) -> None:
    engine = alone
    engine.open("s")
    found = hit(engine, "s", prompt(100), NEW, at(2))
    engine.send(messages.SetBudget(engine.number(), engine.report().budget_bytes // 2))
    engine.until(messages.BudgetSet)
    assert runner_of(engine).probes.parked.nbytes == 0
    assert resumed(engine, "s", found, NEW, at(2, (0, 100))) == greedy(engine, prompt(100), NEW)
    engine.check_idle()


@pytest.mark.parametrize("message", ["truncate", "close", "run"])
def test_held_rows_are_dropped_with_their_session_or_stage(engine: Engine, message: str) -> None:
    engine.open("s")
    hit(engine, "s", prompt(LONG), NEW, at(2))
    assert len(runner_of(engine).probes.parked) == 1
    if message == "truncate":
        engine.send(messages.Truncate("s", 100))
    elif message == "close":
        engine.send(messages.Close("s"))
    else:
        assert engine.tokens("s", [7], NEW) == greedy(engine, [*prompt(LONG), 7], NEW)
    for _ in range(2):  # the engine sweeps once a turn
        engine.report()
    assert runner_of(engine).probes.parked.nbytes == 0


@pytest.mark.parametrize("what", ["cancel", "close"])
def test_a_run_may_be_ended_on_its_way_to_a_stop(engine: Engine, what: str) -> None:
    engine.open("s")
    run = engine.run_message("s", prompt(300), NEW, stops=stops(at(2)))
    message = messages.CancelRun(run.request) if what == "cancel" else messages.Close("s")
    with in_chunk(engine, 2, message):
        engine.send(run)
        tokens, reply = engine.outcome(run.request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled" and tokens == []
    engine.report()


def test_a_cancelled_resume_can_be_made_again(engine: Engine) -> None:
    engine.open("s")
    found = hit(engine, "s", prompt(300), NEW, at(0))
    run = engine.run_message("s", [], NEW, stops=[Stop(3, 0)], resume_block=found.block)
    with in_chunk(engine, 2, messages.CancelRun(run.request)):
        engine.send(run)
        _, reply = engine.outcome(run.request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled"
    assert resumed(engine, "s", found, NEW) == greedy(engine, prompt(300), NEW)


def test_a_fork_of_a_stopped_session(engine: Engine) -> None:
    engine.open("s")
    found = hit(engine, "s", prompt(LONG), NEW, at(2))
    engine.send(messages.Fork("t", "s", "agent"))
    for name in ("t", "s"):
        assert resumed(engine, name, found, NEW) == greedy(engine, prompt(LONG), NEW)


# --- placements of weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "placing", "boundaries"),
    [
        ("llama-2", Placing(resident=1, slots=2), EVERY),
        ("llama-2", Placing(resident=0, slots=2, prefetch=False), [2]),
        ("qwen3-moe", Placing(resident=0, slots=1), [1, BLOCKS]),
    ],
    ids=["two slots", "in turn", "one slot"],
)
def test_streamed_weights(family: str, placing: Placing, boundaries: Sequence[int]) -> None:
    """In prompts and in decode, beside another session. The order of the ring is kept."""
    with Engine() as engine:
        engine.loaded(reduced_model(family), placing=placing)
        engine.family = family
        residency = runner_of(engine).weights.placement
        for block in boundaries:
            engine.open(f"s{block}")
            engine.open(f"t{block}")
            beside = engine.run_message(f"t{block}", prompt(30, seed=1), 2)
            stopping = engine.run_message(f"s{block}", prompt(100), NEW, stops=stops(at(block, (0, 100), (103, 104))))
            engine.send(beside, stopping)
            outcomes = engine.outcomes([beside.request, stopping.request])
            assert outcomes[beside.request][0] == greedy(engine, prompt(30, seed=1), 2)
            first = Hit(engine, *outcomes[stopping.request])
            told, hits = to_the_end(engine, f"s{block}", [], NEW, at(block, (103, 104)), last=first)
            assert len(hits) == 1 and told == greedy(engine, prompt(100), NEW)
            residency.check_integrity()
        engine.check_idle()


def test_steps_of_padded_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes as with graphs, but nothing is captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with Engine() as engine:
        engine.loaded(FOLDER)
        runner = runner_of(engine)
        graphs = StepGraphs(runner.model, engine.device, 64, 32, 8, 8 * runner.plan.page_size)  # type: ignore[arg-type]
        runner.graphs.current = graphs
        graphs.stop_capturing()
        for block in (0, 2, BLOCKS):
            engine.open(f"s{block}")
            told, hits = to_the_end(engine, f"s{block}", prompt(100), NEW, at(block, (0, 100), (103, 104)))
            assert len(hits) == 2 and told == greedy(engine, prompt(100), NEW)
        engine.check_idle()
