from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from djinnd.model.fast.norm import FusedRMSNorm, fused_norm_of
from djinnd.model.fast.replacing import replace_modules
from tests.support.cuda import cuda_device
from tests.support.loaded import load_weights
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu


class WideRMSNorm(nn.Module):
    """Looks like the plain norm, but keeps float32 to the end."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@torch.inference_mode()
def stack(*norms: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    stack = nn.Sequential(*norms).to("cuda", dtype)
    for norm in norms:
        for weight in norm.parameters():
            weight.normal_()
    return stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GemmaRMSNorm])
def test_a_plain_norm_is_replaced_by_one_that_gives_the_same(
    kind: Callable[[int], nn.Module], dtype: torch.dtype
) -> None:
    parent = stack(kind(96), dtype=dtype)
    x = torch.randn(2, 7, 96, device="cuda", dtype=dtype)
    with torch.inference_mode():
        wanted = parent(x)
        replace_modules(parent, fused_norm_of)
        assert isinstance(parent[0], FusedRMSNorm)
        torch.testing.assert_close(parent(x), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert fused_norm_of(parent[0]) is None


def test_norms_that_compute_something_else_stay() -> None:
    norms = [WideRMSNorm(64), nn.LayerNorm(64), nn.Linear(64, 64)]
    parent = stack(*norms)
    replace_modules(parent, fused_norm_of)
    assert list(parent) == norms


@pytest.mark.parametrize(
    ("family", "in_block"),
    [("llama-2", 2), ("qwen3", 4), ("mixtral", 2), ("gpt2", 0), ("gemma-3", 6)],
)
def test_the_norms_of_a_loaded_family(family: str, in_block: int) -> None:
    with cuda_device() as device:
        weights = load_weights(reduced_model(family), device)
        for block in weights.skeleton.adapter.blocks:
            assert sum(isinstance(module, FusedRMSNorm) for module in block.modules()) == in_block
        assert sum(isinstance(m, FusedRMSNorm) for m in weights.skeleton.model.modules()) == (in_block > 0)
        weights.release(device)
