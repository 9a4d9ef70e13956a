from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd import messages
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import FAMILIES, reduced_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with cuda_device() as device, EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        yield engine


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_transformers(engine: EngineThread, family: str) -> None:
    """Sessions with prompts of 1 to 300 tokens run at once in float32, with a forward pass among them."""
    folder, chance = reduced_model(family), random.Random(family)
    engine.loaded(folder, dtype="float32", max_context=512)
    prompts = [random_prompt(length, 512, 1) for length in (1, 300, *(chance.randint(2, 200) for _ in range(8)))]
    runs = []
    for number, prompt in enumerate(prompts):
        engine.open(f"s{number}")
        runs.append(engine.run_message(f"s{number}", prompt, 24))
    engine.open("reader")
    read = random_prompt(150, 512, 2)
    forward = engine.run_message("reader", read, 0, logits=True)
    engine.send(*runs, forward)
    outcomes = engine.outcomes([run.request for run in (*runs, forward)])
    logits = engine.logits(outcomes[forward.request][1])
    np.testing.assert_allclose(logits, reference.logits(folder, read), rtol=0, atol=1e-3)
    for run, prompt in zip(runs, prompts, strict=True):
        tokens, reply = outcomes[run.request]
        assert isinstance(reply, messages.Finished)
        assert tokens == reference.greedy(folder, prompt, 24)
    engine.report()


def test_a_prompt_of_many_chunks(engine: EngineThread) -> None:
    """The host fills the inputs of a chunk while the device computes the chunk before."""
    folder = reduced_model("llama-2")
    engine.loaded(folder, dtype="float32", max_context=2048)
    engine.open("s")
    prompt = random_prompt(1800, 512, 4)
    run = engine.run_message("s", prompt, 8)
    engine.send(run)
    tokens, _ = engine.outcomes([run.request])[run.request]
    assert tokens == reference.greedy(folder, prompt, 8)
    engine.open("reader")
    forward = engine.run_message("reader", prompt, 0, logits=True)
    engine.send(forward)
    logits = engine.logits(engine.outcomes([forward.request])[forward.request][1])
    np.testing.assert_allclose(logits, reference.logits(folder, prompt), rtol=0, atol=1e-3)
    engine.report()


def test_an_unloaded_model_leaves_no_memory(engine: EngineThread) -> None:
    """Weights, pages and graphs are freed without the garbage collector."""
    folder = reduced_model("llama-2")
    allocated = []
    for _ in range(3):
        engine.loaded(folder, kv_bytes=64 << 20, max_context=512)
        engine.open("s")
        engine.outcome(engine.run("s", random_prompt(40, 512, 3), 4))
        engine.send(messages.Close("s"), messages.Unload(7, "m"))
        engine.until(messages.Unloaded)
        assert engine.report().models == []
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2]  # at the first load, libraries allocate workspaces of their own
