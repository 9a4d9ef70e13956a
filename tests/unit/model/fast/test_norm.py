"""The trial that finds norms of families for the kernel."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from djinnd.model.fast.norm import FusedRMSNorm, computed, fused_norm_of, norm_kind_of
from djinnd.model.kernels.fused.rms_norm import (
    BEFORE,
    ROUNDED,
    SHIFTED,
    SIGMOID,
    SILU,
    WIDE,
    NormKind,
)
from tests.support.norms import NORM_KINDS

WIDTH, EPS = 64, 1e-6


FAMILIES = [
    ("llama.LlamaRMSNorm", (WIDTH,), NormKind(ROUNDED.value)),
    ("gemma.GemmaRMSNorm", (WIDTH,), NormKind(SHIFTED.value)),
    ("gemma3.Gemma3RMSNorm", (WIDTH,), NormKind(SHIFTED.value)),
    ("gemma3n.Gemma3nRMSNorm", (WIDTH,), NormKind(WIDE.value)),
    ("olmo2.Olmo2RMSNorm", (WIDTH,), NormKind(WIDE.value)),
    ("qwen3_next.Qwen3NextRMSNorm", (WIDTH,), NormKind(SHIFTED.value)),
    ("qwen3_next.Qwen3NextRMSNormGated", (WIDTH,), NormKind(ROUNDED.value, SILU.value)),
    ("qwen3_5_moe.Qwen3_5MoeRMSNormGated", (WIDTH,), NormKind(ROUNDED.value, SILU.value)),
    ("falcon_h1.FalconH1RMSNormGated", (WIDTH, EPS, 4, True), NormKind(WIDE.value, SILU.value, 4)),
    ("falcon_h1.FalconH1RMSNormGated", (WIDTH, EPS, 4, False), NormKind(WIDE.value, BEFORE.value, 4)),
    ("zamba2.Zamba2RMSNormGated", (WIDTH, 16), NormKind(ROUNDED.value, BEFORE.value, 4)),
]


def norm_of(name: str, arguments: tuple[object, ...]) -> nn.Module:
    module, _, name = name.partition(".")
    found: type[nn.Module] = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    return found(*arguments).to(torch.bfloat16)


@pytest.mark.parametrize(("name", "arguments", "wanted"), FAMILIES)
def test_a_trial_finds_what_a_familys_norm_computes(name: str, arguments: tuple[object, ...], wanted: NormKind) -> None:
    with torch.inference_mode():
        assert norm_kind_of(norm_of(name, arguments), EPS) == wanted


class Gated(nn.Module):
    """A norm of a given kind."""

    def __init__(self, own: NormKind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(96, dtype=torch.float16), requires_grad=False)
        self.own, self.n_groups = own, own.groups

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return computed(x, self.weight, EPS, self.own, gate)


@pytest.mark.parametrize("own", [each for each in NORM_KINDS if each.gate], ids=str)
def test_kinds_with_a_gate_are_told_apart(own: NormKind) -> None:
    assert norm_kind_of(Gated(own), EPS) == own


class Centred(nn.Module):
    """Subtracts the mean, which no kind does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), EPS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, None, self.eps)


def test_other_modules_stay() -> None:
    for module in (Centred(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)):
        assert fused_norm_of(module) is None
    fused = FusedRMSNorm(torch.ones(WIDTH), EPS, NormKind(WIDE.value))
    assert fused_norm_of(fused) is None


def test_kimis_gate_is_a_sigmoid() -> None:
    name = "kimi_linear.KimiLinearRMSNormGated"
    pytest.importorskip("transformers.models.kimi_linear")
    with torch.inference_mode():
        assert norm_kind_of(norm_of(name, (WIDTH,)), EPS) == NormKind(WIDE.value, SIGMOID.value)
