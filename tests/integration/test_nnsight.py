"""What nnsight makes of its examples (reading, steering, patching) on a reduced model is what the daemon makes of them.

Only where nnsight is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon
from tests.support.models import reduced_model, tiny_model

nnsight = pytest.importorskip("nnsight")

FOLDER = reduced_model("llama-3.1")
PROMPT, OTHER = [5, 9, 33, 40, 7], [300, 20, 101, 7, 55]
NEW = 12
V = torch.randn(64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Any:
    return nnsight.TransformersModel(
        reference.model_of(FOLDER), tokenizer=AutoTokenizer.from_pretrained(tiny_model()), task="text-generation"
    )


@pytest.fixture(scope="module")
def own_daemon() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start()


@pytest.fixture
def session(own_daemon: Daemon) -> Iterator[djinn.Session]:
    with djinn.Session(str(FOLDER), address=own_daemon.address) as s:
        yield s


def ids(tokens: list[int]) -> Tensor:
    return torch.tensor([tokens])


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-4)


def test_reading(model: Any, session: djinn.Session) -> None:
    with model.trace(ids(PROMPT)):
        attention = model.model.layers[1].self_attn.output[0].save()
        mlp = model.model.layers[2].mlp.output.save()
        hidden = model.model.layers[2].output.save()
        norm = model.model.norm.output.save()
        logits = model.lm_head.output.save()
    names = ["model.layers.1.self_attn", "model.layers.2.mlp", "model.layers.2", "model.norm", "lm_head"]
    cache = session.capture(names).run(PROMPT)
    for name, expected in zip(names, (attention, mlp, hidden, norm, logits), strict=True):
        assert_close(cache[name], expected)


def test_steering(model: Any, session: djinn.Session) -> None:
    with model.generate(ids(PROMPT), max_new_tokens=NEW) as tracer:
        for _ in tracer.iter[:NEW]:
            model.model.layers[1].output[:] += 2 * V
        tokens = tracer.result.save()
    session.steer("model.layers.1", V, scale=2)
    answer = session.generate(PROMPT, max_tokens=NEW, ignore_eos=True)
    assert answer.token_ids == tokens[0, len(PROMPT) :].tolist()


def test_patching(model: Any, session: djinn.Session) -> None:
    with model.trace(ids(PROMPT)):
        clean = model.model.layers[1].output.save()
    with model.trace(ids(OTHER)):
        model.model.layers[1].output[:, 3] = clean[:, 3]
        logits = model.lm_head.output.save()
    cache = session.capture("model.layers.1").run(PROMPT)
    session.truncate(0)
    session.patch(cache["model.layers.1"], positions=[3])
    assert_close(session.capture("logits").run(OTHER)["logits"], logits)
