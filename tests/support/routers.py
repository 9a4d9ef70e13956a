"""Routers of transformers with random weights, and a comparison with the kernel in their place. Tensors are made on
torch's default device."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn

from djinnd.model.fast.router import FusedRouter, kind_of
from djinnd.model.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_PICKS, Weighting

EXPERTS, PICKS, HIDDEN = 16, 4, 32
CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), PICKS),
    **{"hidden_size": HIDDEN, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    **{"moe_router_logit_softcapping": 0.0, "topk_method": "greedy", "expert_selection_fn": "softmax"},
}
OF_PICKS, ALL, NORMED = (
    Weighting(SOFTMAX_OF_PICKS.value),
    Weighting(SOFTMAX.value),
    Weighting(SOFTMAX.value, is_normalised=True),
)
DEEPSEEK = Weighting(SIGMOID.value, is_corrected=True, is_normalised=True, epsilon=1e-20, factor=2.5)
FAMILIES = [
    ("gpt_oss.GptOssTopKRouter", OF_PICKS),
    ("aria.AriaTextTopKRouter", OF_PICKS),
    ("granitemoe.GraniteMoeTopKRouter", OF_PICKS),
    ("mixtral.MixtralTopKRouter", NORMED),
    ("qwen3_moe.Qwen3MoeTopKRouter", NORMED),
    ("qwen3_next.Qwen3NextTopKRouter", NORMED),
    ("olmoe.OlmoeTopKRouter", NORMED),
    ("jamba.JambaTopKRouter", ALL),
    ("deepseek_v2.DeepseekV2TopkRouter", Weighting(SOFTMAX.value, factor=2.5)),
    ("deepseek_v3.DeepseekV3TopkRouter", DEEPSEEK),
    ("glm4_moe.Glm4MoeTopkRouter", DEEPSEEK),
    ("minimax_m2.MiniMaxM2TopKRouter", Weighting(SIGMOID.value, is_corrected=True, is_normalised=True)),
]


def class_of(name: str) -> type[nn.Module]:
    """Skips the test where the installed transformers is older than the router."""
    module, _, name = name.partition(".")
    found: type[nn.Module] | None = getattr(
        import_module(f"transformers.models.{module}.modeling_{module}"), name, None
    )
    return found or pytest.skip(f"transformers {transformers.__version__} has no {name}")


def router_of(of: type[nn.Module], dtype: torch.dtype = torch.float32, **changed: object) -> nn.Module:
    router = of(SimpleNamespace(**CONFIG | changed)).to(dtype)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.requires_grad_(False).normal_()
    return router


def input_without_ties(router: nn.Module, rows: int = 5) -> Tensor:
    """x for which all logits of a row differ, also in 16 bits. Changes the router's weights."""
    weight, bias = router.get_parameter("weight"), router._parameters.get("bias")
    weight.copy_(torch.eye(EXPERTS, HIDDEN))
    if bias is not None:
        bias.copy_(torch.randint(-2, 3, (EXPERTS,)))
    levels = torch.stack([torch.randperm(EXPERTS) for _ in range(rows)]) / 16 - 0.5
    return torch.cat([levels, torch.randn(rows, HIDDEN - EXPERTS)], 1).to(weight.dtype)


@torch.inference_mode()
def check_family(name: str, weighting: Weighting, dtype: torch.dtype, rows: int = 5) -> None:
    """The trial finds the weighting, and then the router gives what it gave before."""
    router = router_of(class_of(name), dtype)
    x = input_without_ties(router, rows)
    given = (x, torch.randn(EXPERTS)) if len(signature(router.forward).parameters) == 2 else (x,)
    wanted = router(*given)
    with torch.device("cpu"):
        kind = kind_of(router, dtype)
    assert kind is not None and kind.picks == PICKS
    alike = {OF_PICKS, NORMED} if dtype is not torch.float32 else set()  # 16 bits do not show the difference
    assert kind.weighting == weighting or {kind.weighting, weighting} == alike
    fused = FusedRouter(router, kind)
    assert router.forward is fused
    found = router(*given)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    names = [name for name, _ in kind.items]  # transformers 5.17 has another order than later versions in some families
    got, own = dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True))
    assert torch.equal(got["logits"], own["logits"])
    order, theirs = got["picks"].sort(1).indices, own["picks"].sort(1).indices  # some families leave their order open
    assert torch.equal(got["picks"].gather(1, order), own["picks"].gather(1, theirs))
    one, other = got["weights"].gather(1, order), own["weights"].gather(1, theirs)
    torch.testing.assert_close(one, other, rtol=max(torch.finfo(one.dtype).eps, 1e-5), atol=0)
