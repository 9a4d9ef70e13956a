"""Traces: with a clock that the test sets, and in a real engine that streams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from djinn_client.protocol import Placing, Span
from djinnd import messages
from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine import tracing
from djinnd.engine.tracing import Tracer
from tests.support.engine_thread import EngineThread
from tests.support.tiered import Tiered
from tests.support.traces import check_streaming
from tests.support.troubled import TroubledDevice


def batch(*counts: int) -> Batch:
    rows = []
    for number, count in enumerate(counts):
        session = Session(f"s{number}", "m", 0, "agent")
        request = Request(id=number, first=0, prompt_end=count, max_tokens=1)
        rows.append(Row(session, request, 0, count, 0, 1, samples=True))
    return Batch("m", tuple(rows), 0)


class Scene:
    def __init__(self) -> None:
        self.device = TroubledDevice(1 << 20)
        self.now = 0.0
        self.sent: list[messages.Traced | messages.Failed] = []
        self.tracer = Tracer(self.device, self.sent.append, lambda: self.now)

    def step(self, *counts: int) -> None:
        with self.tracer.step(batch(*counts)), self.device.span("compute", "block 0"):
            self.device.copy(torch.zeros(4), torch.ones(4), name="block 1")
        self.tracer.answer()

    def turn(self) -> None:
        """A turn without a step."""
        self.tracer.turn()
        self.tracer.answer()

    def spans(self) -> list[Span]:
        """The spans of the only reply so far."""
        (answer,) = self.sent
        assert isinstance(answer, messages.Traced) and answer.request == 7
        return answer.spans


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.device.let_go()
    scene.device.close()


def test_exactly_the_asked_number_of_steps_is_recorded(scene: Scene) -> None:
    scene.step(1)
    scene.tracer.start(messages.Trace(7, steps=2, seconds=10))
    scene.step(1, 1, 30)
    assert scene.sent == []
    scene.step(1)
    scene.step(1, 1)
    scene.device.synchronize()
    scene.tracer.answer()
    steps = [span.args for span in scene.spans() if span.track == "step"]
    assert steps == [
        {"model": "m", "rows": 3, "tokens": 32, "chunks": 1},
        {"model": "m", "rows": 1, "tokens": 1, "chunks": 0},
    ]
    assert sorted(span.track for span in scene.spans()) == ["compute", "compute", "copy", "copy", "step", "step"]
    scene.tracer.answer()
    assert len(scene.sent) == 1


def test_a_trace_ends_with_the_recorded_steps_when_its_time_is_up(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=4, seconds=10))
    scene.step(1)
    scene.device.synchronize()
    scene.now = 9.9
    scene.turn()
    assert scene.sent == []
    scene.now = 10.0
    scene.turn()
    assert [span.track for span in scene.spans()].count("step") == 1


def test_an_idle_engine_replies_with_no_spans(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=4, seconds=10))
    scene.now = 10.0
    scene.turn()
    assert scene.spans() == []


def test_the_reply_comes_after_the_last_copy(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=1, seconds=10))
    scene.device.gate.clear()
    scene.step(1)
    scene.now = 11.0
    scene.tracer.answer()
    assert scene.sent == [], "the copy waits at the gate"
    scene.step(1)  # is not recorded, and does not wait for the trace
    scene.device.let_go()
    scene.device.synchronize()
    scene.tracer.answer()
    assert [span.name for span in scene.spans() if span.track == "copy"] == ["block 1"]


def test_a_long_trace_is_read_in_parts_and_beside_unrecorded_steps(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "READ_AT_ONCE", 2)
    scene.tracer.start(messages.Trace(7, steps=2, seconds=10))
    for _ in range(2):  # a step, a block and a copy each
        with scene.tracer.step(batch(1)), scene.device.span("compute", "block 0"):
            scene.device.copy(torch.zeros(4), torch.ones(4), name="block 1").wait()
            assert not scene.tracer.answer(), "it has not ended"
    with scene.tracer.step(batch(1)):
        assert [scene.tracer.answer() for _ in range(2)] == [True, True] and not scene.sent
        assert not scene.tracer.answer()
    assert len(scene.spans()) == 6


def test_a_second_trace_is_refused_until_the_first_has_its_reply(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=1, seconds=10))
    scene.now = 3.0
    scene.tracer.start(messages.Trace(8, steps=1, seconds=10))
    refusal = "another trace is being recorded, for up to 7.0 s more: try again then"
    assert scene.sent == [messages.Failed(8, "retry", refusal, {"seconds": 7.0})]
    scene.sent.clear()
    scene.step(1)
    scene.device.synchronize()
    scene.tracer.answer()
    assert len(scene.spans()) == 3
    scene.tracer.start(messages.Trace(9, steps=1, seconds=10))
    assert len(scene.sent) == 1


def test_a_failed_step_counts_and_has_no_span(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=2, seconds=10))
    with pytest.raises(RuntimeError, match="in mid-way"), scene.tracer.step(batch(1)):
        raise RuntimeError("in mid-way")
    scene.step(1)
    assert scene.device.trace is None
    scene.device.synchronize()
    scene.tracer.answer()
    assert [span.track for span in scene.spans()].count("step") == 1


def test_copies_between_steps_are_recorded(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=1, seconds=10))
    scene.device.copy(torch.zeros(4), torch.ones(4), name="block 0")
    scene.step(1)
    scene.device.copy(torch.zeros(4), torch.ones(4), name="block 2")
    scene.device.synchronize()
    scene.tracer.answer()
    assert [span.name for span in scene.spans() if span.track == "copy"] == ["block 0", "block 1"]


def names(scene: Scene) -> list[str]:
    return [span.name for span in scene.spans() if span.track in ("host", "step")]


def test_host_work_before_and_after_a_step_is_recorded(scene: Scene) -> None:
    scene.tracer.start(messages.Trace(7, steps=2, seconds=10))
    for _ in range(2):
        scene.tracer.turn()
        for what in ("messages", "compose"):
            scene.tracer.did(what, calls=3)
        scene.step(1)
        scene.tracer.did("complete")
    scene.device.synchronize()
    scene.tracer.answer()
    assert names(scene) == ["messages", "compose", "step", "complete", "messages", "compose", "step"]
    spans = [span for span in scene.spans() if span.track in ("host", "step")]
    assert [span.args for span in spans if span.name == "messages"] == [{"calls": 3}] * 2
    for before, after in pairwise(spans):
        assert before.start_us + before.duration_us <= after.start_us + 1e-3


def test_turns_without_a_step_record_nothing(scene: Scene) -> None:
    scene.tracer.turn()
    scene.tracer.did("nothing, as there is no trace")
    scene.tracer.start(messages.Trace(7, steps=2, seconds=10))
    scene.tracer.did("what began before the trace")
    scene.tracer.turn()
    scene.tracer.did("something, and no step")
    for _ in range(2):
        scene.tracer.turn()
        scene.tracer.did("messages")
    scene.step(1)
    scene.tracer.did("complete")
    for _ in range(3):
        scene.tracer.turn()
        scene.tracer.did("idle")
    scene.step(1)
    scene.device.synchronize()
    scene.tracer.answer()
    assert names(scene) == ["messages", "step", "idle", "step"]


# --- in a real engine -----------------------------------------------------------------------------------------------


def test_pages_that_leave_and_come_back_have_their_own_tracks() -> None:
    with Tiered() as engine:
        engine.load_with_tiers()
        engine.open("s")
        engine.ran("s")
        engine.send(messages.Trace(99, steps=1, seconds=60.0))
        paused = engine.paused("s")
        engine.send(messages.Resume("s"), engine.run_message("s", [5], 1))
        traced = engine.until(messages.Traced, messages.Stepped, messages.Finished)
    (step,) = (span for span in traced.spans if span.track == "step")
    page_bytes = paused.nbytes // paused.pages
    for track, name in (("pages down", "demote"), ("pages up", "promote")):
        copies = [span for span in traced.spans if span.track == track]
        pages = sum(int(span.name.removeprefix(f"{name} ")) for span in copies)
        assert 1 <= pages <= paused.pages, "what has been demoted before stays on the host"
        assert sum(span.args["bytes"] for span in copies) == pages * page_bytes
        assert all(span.start_us + span.duration_us <= step.start_us for span in copies), "the step needs them"
        assert all(span.duration_us > 0 for span in copies)
    assert "copy" not in {span.track for span in traced.spans}, "every block is resident"


@pytest.mark.parametrize(
    "placing",
    [
        Placing(resident=1, packing=False),
        Placing(resident=1, slots=2, piece_bytes=20_000),
        Placing(resident=1, prefetch=False),
        Placing(resident=4),
    ],
    ids=["plain", "two slots in pieces", "no prefetch", "half"],
)
def test_each_streamed_block_is_copied_once_a_step_and_never_into_a_slot_in_use(placing: Placing) -> None:
    with EngineThread() as engine:
        check_streaming(engine, placing, steps=3, rounding_us=1e-3)
