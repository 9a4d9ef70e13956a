"""Compares edits and captures of many sessions, on a device with graphs, with hooks in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.model.step.shapes import Shape
from djinnd.model.whitebox.probe import Probe
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.hooked import Hooked
from tests.support.models import reduced_model
from tests.support.whitebox import NEW, RESID, WhiteBoxEngine, check_a_batch, prompt, steering

pytestmark = pytest.mark.gpu

FOLDER = reduced_model("llama-2")


@pytest.fixture
def engine() -> Iterator[WhiteBoxEngine]:
    with cuda_device() as device, WhiteBoxEngine(device, max_batch_tokens=128, max_rows=16) as engine:
        yield engine


@pytest.mark.parametrize("placing", [Placing(), Placing(resident=1)], ids=["resident", "streamed"])
def test_sessions_of_one_batch_have_different_edits(engine: WhiteBoxEngine, placing: Placing) -> None:
    """The first run is eager and leaves graphs, which the second one uses."""
    engine.loaded(FOLDER, dtype="float32", max_context=512, placing=placing)
    for _ in range(3):
        engine.tenant += 1
        check_a_batch(engine, Hooked(FOLDER), atol=1e-3)
        engine.check_idle()


def test_a_session_that_is_steered_between_blocks_keeps_its_graphs(engine: WhiteBoxEngine) -> None:
    engine.loaded(FOLDER, dtype="float32", max_context=512)
    hooked, edit = Hooked(FOLDER), steering(engine, 0)
    engine.open("s")
    engine.edit("s", edit)
    assert engine.tokens("s", prompt(20), NEW) == hooked.greedy(prompt(20), NEW, [edit])
    graphs, ran = engine.runner().graphs.current, []
    assert graphs is not None
    run = graphs.run

    def noted(shape: Shape, logit_rows: int, probe: Probe | None, *more: Any) -> Tensor | None:
        ran.append((shape in graphs._captured, probe is not None))
        return run(shape, logit_rows, probe, *more)

    graphs.run = noted  # type: ignore[method-assign]
    for _ in range(2):
        engine.send(messages.Truncate("s", 0))
        assert engine.tokens("s", prompt(20), NEW) == hooked.greedy(prompt(20), NEW, [edit])
    assert len(ran) == 2 * NEW and set(ran) == {(True, True)}


def test_a_large_capture_over_the_bus(engine: WhiteBoxEngine) -> None:
    engine.loaded(FOLDER, dtype="float32", max_context=2048)
    engine.open("s")
    engine.open("t")
    points = [RESID, *(Point("attn", block) for block in range(4)), *(Point("mlp", block) for block in range(4))]
    run = engine.run_message("s", prompt(1500), 20, capture=points)
    other = engine.run_message("t", prompt(20), 100)
    engine.send(run, other)
    outcomes = engine.outcomes([run.request, other.request])
    _, seen = engine.captured(outcomes[run.request][1], points)
    assert all(len(rows) == 1519 and rows.isfinite().all() for rows in seen.values())
    engine.open("u")
    _, reply = engine.outcome(engine.run("u", prompt(1500), 0, capture=[RESID]))
    again = engine.captured(reply, [RESID])[1][RESID]
    torch.testing.assert_close(seen[RESID][:1500], again, rtol=1e-3, atol=1e-3)
    engine.check_idle()


def test_an_engine_without_edits_gives_the_tokens_of_transformers(engine: WhiteBoxEngine) -> None:
    engine.loaded(FOLDER, dtype="float32", max_context=512)
    engine.open("s")
    assert engine.tokens("s", prompt(20), NEW) == reference.greedy(FOLDER, prompt(20), NEW)
