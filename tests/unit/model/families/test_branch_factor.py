"""Granite's factor moves from the blocks into attention and MLP, without a change of results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    PreTrainedConfig,
)

from djinnd.model.families import branch_factor
from djinnd.model.family.adapter import find_blocks
from djinnd.model.family.skeleton import build
from tests.unit.model.family.test_skeleton import SMALL

FACTOR = 0.22
IDS = torch.tensor([[5, 9, 11, 2]])


def small(kind: type[PreTrainedConfig], **entries: Any) -> PreTrainedConfig:
    return kind(**SMALL | {"residual_multiplier": FACTOR, **entries})


MOVED = {
    "granite": (lambda: small(GraniteConfig), "mlp"),
    "granitemoe": (lambda: small(GraniteMoeConfig, num_local_experts=4), "block_sparse_moe"),
    "without shared experts": (
        lambda: small(GraniteMoeSharedConfig, num_local_experts=4, shared_intermediate_size=0),
        "block_sparse_moe",
    ),
    "granitemoehybrid": (
        lambda: small(
            GraniteMoeHybridConfig,
            num_local_experts=0,
            shared_intermediate_size=32,
            mamba_n_heads=4,
            layer_types=["full_attention"] * 2,
        ),
        "shared_mlp",
    ),
}
STAYS = {
    "shared experts": lambda: small(GraniteMoeSharedConfig, num_local_experts=4, shared_intermediate_size=32),
}


def model_of(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MOVED)
@torch.inference_mode()
def test_modules_return_the_multiplied_outputs_and_results_are_equal(family: str, dtype: torch.dtype) -> None:
    make, mlp = MOVED[family]
    model = model_of(make(), dtype)
    wanted = model(IDS, use_cache=False).logits
    blocks = find_blocks(model)
    branch_factor.move(blocks)
    seen: dict[str, Tensor] = {}
    for name in ("self_attn", mlp, ""):
        _see(blocks[1], name, seen)
    got = model(IDS, use_cache=False).logits
    assert torch.equal(got, wanted)
    assert torch.equal(seen["given"] + seen["self_attn"] + seen[mlp], seen[""])
    assert seen["self_attn"].any() and seen[mlp].any()


@pytest.mark.parametrize("family", STAYS)
@torch.inference_mode()
def test_the_factor_stays_where_results_would_change(family: str) -> None:
    model = model_of(STAYS[family](), torch.float32)
    wanted = model(IDS, use_cache=False).logits
    branch_factor.move(find_blocks(model))
    assert torch.equal(model(IDS, use_cache=False).logits, wanted)
    assert all(block.residual_multiplier == FACTOR for block in find_blocks(model))


def test_build_moves_the_factor() -> None:
    model = build(small(GraniteConfig), torch.float32)
    for block in find_blocks(model):
        assert block.residual_multiplier == 1.0
        assert len(block.self_attn._forward_hooks) == len(block.mlp._forward_hooks) == 1


def _see(block: nn.Module, name: str, seen: dict[str, Tensor]) -> None:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        seen[name] = output[0] if isinstance(output, tuple) else output
        if not name:
            seen["given"] = given[0]

    block.get_submodule(name).register_forward_hook(hook)
