"""Runs that stop at a breakpoint inside of the model and go on, on a device with graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.core.edits import Extent
from djinnd.core.stops import Stop
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.hooked import Hooked
from tests.support.models import reduced_model
from tests.support.whitebox import NEW, WhiteBoxEngine, an_edit, prompt

pytestmark = pytest.mark.gpu

BLOCKS = 4
PLACINGS = {"resident": Placing(), "streamed": Placing(resident=1, slots=2)}


@pytest.fixture
def engine() -> Iterator[WhiteBoxEngine]:
    with cuda_device() as device, WhiteBoxEngine(device, max_batch_tokens=128, max_rows=16) as engine:
        yield engine


@pytest.mark.parametrize("family", ["llama-2", "qwen3-moe"])
@pytest.mark.parametrize("placing", PLACINGS.values(), ids=PLACINGS)
def test_a_run_stops_at_every_boundary_and_goes_on(engine: WhiteBoxEngine, placing: Placing, family: str) -> None:
    """Stops at every boundary, in a prompt of several chunks and at each generated token, while a session decodes.
    The first run is eager and leaves graphs, which the second one uses."""
    folder = reduced_model(family)
    engine.loaded(folder, dtype="float32", max_context=1024, placing=placing)
    expected = reference.greedy(folder, prompt(300), NEW)
    for _ in range(3):
        engine.tenant += 1
        engine.open("beside")
        beside = engine.run("beside", prompt(20, seed=1), 200)
        told: dict[int, list[int]] = {}
        finished: dict[int, messages.Finished] = {}

        def outcome(request: int) -> messages.Finished:
            while request not in finished:  # noqa: B023
                message = engine.receive()
                if isinstance(message, messages.Stepped):
                    for token in message.tokens:
                        told.setdefault(token.request, []).append(token.token)  # noqa: B023
                else:
                    assert isinstance(message, messages.Finished), message
                    finished[message.request] = message  # noqa: B023
            return finished[request]  # noqa: B023

        for block in range(BLOCKS + 1):
            session, tokens, first, stopped = f"s{block}", prompt(300), 0, None
            mine: list[int] = []
            engine.open(session)
            while True:
                left = NEW - len(mine)
                request = engine.run(session, tokens, left, stops=[Stop(block, first)], resume_block=stopped)
                reply, tokens = outcome(request), []
                mine += told.get(request, [])
                if reply.stopped is None:
                    break
                assert reply.capture is not None
                first, stopped = reply.length, reply.stopped
            assert mine == expected
        outcome(beside)
        assert told[beside][:40] == reference.greedy(folder, prompt(20, seed=1), 40)
        engine.check_idle()


def test_activations_of_a_hit_are_those_of_a_capture_and_can_be_edited(engine: WhiteBoxEngine) -> None:
    """With graphs, the activations equal those of a capture, and an edit at the hit equals the same edit without a
    breakpoint."""
    folder = reduced_model("llama-2")
    engine.loaded(folder, dtype="float32", max_context=1024)
    engine.open("warm")
    engine.tokens("warm", prompt(200, seed=9), NEW)
    for block in range(1, BLOCKS + 1):
        point = Point("resid", block)
        engine.tenant += 1
        engine.open(f"s{block}")
        engine.open(f"t{block}")
        _, reply = engine.outcome(engine.run(f"t{block}", prompt(200), 1, capture=[point]))
        expected = engine.captured(reply, [point])[1][point]
        _, reply = engine.outcome(engine.run(f"s{block}", prompt(200), NEW, stops=[Stop(block, 0)]))
        found = engine.captured(reply, [point])[1][point]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        edit = an_edit("replace", [point], [Extent(0, 200)], -found)
        engine.edit(f"s{block}", edit)
        tokens, _ = engine.outcome(engine.run(f"s{block}", [], NEW, resume_block=block))
        assert tokens == Hooked(folder).greedy(prompt(200), NEW, [edit])
    engine.check_idle()
