"""Edits by a hook in transformers' model. Edits by nnsight are tested in tests/integration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from tests.support.models import reduced_model
from tools.bench.peers.whitebox import Model, by_hooks, by_nnsight
from tools.bench.peers.whitebox_job import Job, Outcome
from tools.bench.stream.outcome import Status
from tools.transformers_cache import cache_argument

PROMPTS = [[5, 9, 33, 40, 7], [300, 20, 101, 7, 55]]
NEW = 6


@pytest.fixture(scope="module", params=["gpt2", "mistral"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return reduced_model(request.param)


def model(checkpoint: Path, scale: float) -> Model:
    return Model(
        Job(
            checkpoint=str(checkpoint),
            device="cpu",
            dtype="float32",
            prompts=PROMPTS,
            blocks=[1, 4],
            scale=scale,
            tokens=NEW,
            answer="",
        )
    )


@torch.inference_mode()
def test_an_edit_that_changes_nothing_leaves_the_tokens(checkpoint: Path) -> None:
    answer = by_hooks(model(checkpoint, 1.0))
    hooks = answer.peers["hooks"]
    assert hooks.status is Status.MEASURED and list(hooks.edited) == [1, 4]
    assert all(one.tokens == answer.plain and len(one.seconds) == len(PROMPTS) for one in hooks.edited.values())
    assert [len(tokens) for tokens in answer.plain] == [NEW, NEW]


def token_by_token(edited: Model, ids: torch.Tensor, blocks: int, scale: float) -> list[int]:
    """Generates greedy tokens with an edit in the prompt's pass only."""
    name = next(name for name, _ in edited.own.named_modules() if name.endswith((f"h.{blocks - 1}", f"s.{blocks - 1}")))
    handle = edited.own.get_submodule(name).register_forward_hook(lambda _module, _args, output: output * scale)
    past = cache_argument(edited.own, DynamicCache())
    out = edited.own(ids, **past, use_cache=True)
    handle.remove()
    tokens = [int(out.logits[0, -1].argmax())]
    while len(tokens) < NEW:
        out = edited.own(torch.tensor([tokens[-1:]]), **past, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


@torch.inference_mode()
def test_an_edit_changes_the_prompts_pass_and_no_later_pass(checkpoint: Path) -> None:
    edited = model(checkpoint, 0.3)
    answer = by_hooks(edited)
    found = {blocks: one.tokens for blocks, one in answer.peers["hooks"].edited.items()}
    assert found == {blocks: [token_by_token(edited, ids, blocks, 0.3) for ids in edited.prompts] for blocks in (1, 4)}
    assert found[1] != answer.plain


def test_missing_nnsight_is_its_outcome(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nnsight", None)
    expected = Outcome(status=Status.SKIPPED, note="nnsight is not installed")
    assert by_nnsight(model(checkpoint, 0.9)) == expected
