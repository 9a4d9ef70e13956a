"""Gemma 3n: a row of djinnd's hidden states holds all hidden states of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from djinn_client.protocol.fields.points import Point
from djinnd.device.cpu import CpuDevice
from djinnd.model.families.altup import Sparsity, fold, unfold
from djinnd.model.step.inputs import StepInputs
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import MEMORY, fill, load_weights, paged_model
from tests.support.probing import Looking
from tests.unit.model.family.test_skeleton import skeleton_of
from tests.unit.model.test_kv_shapes import COMMON, config_of, prompt

STATES, WIDTH = 4, int(COMMON["hidden_size"])
TOKENS = 20


def test_a_row_holds_the_states_one_behind_the_other() -> None:
    hidden = torch.randn(STATES, 1, 3, 5)
    folded = fold(hidden)
    assert folded.shape == (1, 3, STATES * 5)
    assert torch.equal(folded[0, 1], hidden[:, 0, 1].flatten())
    assert torch.equal(unfold(folded, STATES), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsity_is_the_family_s(dtype: torch.dtype) -> None:
    own = Gemma3nTextMLP(config_of("gemma 3n"), layer_idx=0)
    assert own.activation_sparsity == 0.9
    inputs = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = own._gaussian_topk(inputs)
    assert 0 < wanted.count_nonzero() < wanted.numel() / 5
    assert torch.equal(Sparsity(0.9)(inputs), wanted)


def test_points_within_a_block_have_another_width_and_are_left_out() -> None:
    points = skeleton_of(config_of("gemma 3n")).points
    assert (points.width, points.attention, points.mlp, points.norm) == (STATES * WIDTH, "", "", "")
    assert points.head == ""  # its logits are capped


def test_hidden_states_at_points_are_those_of_transformers(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", config_of("gemma 3n"))
    model, wanted = reference.model_of(folder), list[Tensor]()
    layers = model.get_decoder().layers
    hooks = [layers[0].register_forward_pre_hook(lambda module, given: wanted.append(fold(given[0])))]
    hooks += [layer.register_forward_hook(lambda module, given, out: wanted.append(fold(out))) for layer in layers]
    with torch.inference_mode():
        model(torch.tensor([prompt(TOKENS)]))
    for hook in hooks:
        hook.remove()

    device = CpuDevice(MEMORY)
    weights = load_weights(folder, device)
    paged = paged_model(weights, 4, 16)
    inputs = StepInputs(device, TOKENS, 1, 2)
    fill(inputs, [(prompt(TOKENS), 0, [2, 1])], 16)
    inputs.send()
    points = [Point("resid", block) for block in range(len(layers) + 1)]
    looking = Looking(points)
    paged.forward(inputs, inputs.paged_batch(max_query=TOKENS, max_kv=TOKENS, fresh=True), probe=looking)
    for point, states in zip(points, wanted, strict=True):
        torch.testing.assert_close(looking.seen[point], [states[0]], rtol=1e-4, atol=1e-4)
    weights.release(device)
    device.close()
