"""The trials of the fast path, on the CPU with interpreted kernels. Run by test_interpreted.py."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from djinnd.model.fast.linear import FastLinear, fast_linear, fast_linear_of
from djinnd.model.fast.mlp import GatedMLP, gated_mlp_of
from djinnd.model.fast.replacing import replace_modules
from djinnd.model.fast.rope import NAME, FastRope, replace_rope
from djinnd.model.kernels.launching.interpreter import INTERPRETED

assert INTERPRETED

# exp of a large number is infinite on the GPU, and its inverse 0, which is intended; numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

CPU = torch.device("cpu")


def fast_rope(family: str) -> FastRope:
    own = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), NAME)
    return FastRope(own.own if isinstance(own, FastRope) else own)


@pytest.mark.parametrize(
    ("family", "half", "angles"),
    [
        ("llama", False, [torch.float16]),
        ("olmo2", False, [torch.float16, torch.float32]),  # float32 angles; the result has the dtype of q
        ("cohere", False, []),  # interleaved pairs
        ("gpt_oss", True, [torch.float16]),  # angles of half a head
    ],
)
def test_a_trial_finds_the_families_that_the_rope_kernel_serves(
    family: str, half: bool, angles: list[torch.dtype]
) -> None:
    fast, kinds = fast_rope(family), (torch.float16, torch.float32)
    assert [kind for kind in kinds if fast.agrees(torch.float16, kind, CPU, half=half)] == angles
    assert not any(fast.agrees(torch.float16, kind, CPU, half=not half) for kind in kinds)


def test_tensors_on_the_cpu_go_to_the_familys_function() -> None:
    fast = fast_rope("llama")
    assert fast.try_with(torch.float32, CPU)
    q, cos = torch.randn(1, 2, 3, 64), torch.randn(1, 3, 64)
    assert torch.equal(fast(q, q, cos, cos)[0], fast.own(q, q, cos, cos)[0])
    assert fast(q, q, cos, cos)[0].is_contiguous()  # the kernel's output would not be


def test_a_function_with_other_arguments_is_not_replaced() -> None:
    module = import_module(GPTJAttention.__module__)
    own = getattr(module, NAME)
    attention = GPTJAttention.__new__(GPTJAttention)
    nn.Module.__init__(attention)
    replace_rope(attention, torch.float32, CPU)
    assert getattr(module, NAME) is own


def test_rope_is_replaced_once_in_the_familys_file(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(LlamaAttention.__module__)
    monkeypatch.setattr(module, NAME, getattr(module, NAME))
    attention = LlamaAttention.__new__(LlamaAttention)
    nn.Module.__init__(attention)
    for _ in range(2):
        replace_rope(attention, torch.float32, CPU)
        replaced = getattr(module, NAME)
        assert isinstance(replaced, FastRope) and not isinstance(replaced.own, FastRope)


def mlp(kind: type[nn.Module], activation: str) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=24, intermediate_size=40, mlp_bias=False, hidden_act=activation, hidden_activation=activation
    )
    return kind(config)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "activation"), [(LlamaMLP, "silu"), (GemmaMLP, "gelu_pytorch_tanh")])
def test_a_gated_mlp_is_replaced_by_one_that_gives_the_same(kind: type[nn.Module], activation: str) -> None:
    own, x = mlp(kind, activation), torch.randn(1, 3, 24)
    wanted = own(x)
    fast = gated_mlp_of(own, torch.float32, CPU)
    assert isinstance(fast, GatedMLP) and gated_mlp_of(fast, torch.float32, CPU) is None
    torch.testing.assert_close(fast(x), wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_hooks_of_a_gated_mlp_go_over_to_its_replacement() -> None:
    """Granite's factor is in such a hook (families/branch_factor.py)."""
    own, x = mlp(LlamaMLP, "silu"), torch.randn(1, 3, 24)
    own.register_forward_hook(lambda module, given, output: output * 0.22)
    wanted = own(x)
    fast = gated_mlp_of(own, torch.float32, CPU)
    assert fast is not None
    torch.testing.assert_close(fast(x), wanted, rtol=1e-5, atol=1e-6)


class Clamped(LlamaMLP):
    """Looks like the plain MLP, but clamps its activations."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1) * self.up_proj(x))


class Curious(LlamaMLP):
    """Reads its weights in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.gate_proj.weight.dtype))


@pytest.mark.parametrize(("kind", "activation"), [(LlamaMLP, "relu"), (Clamped, "silu"), (Curious, "silu")])
def test_an_mlp_that_computes_something_else_stays(kind: type[nn.Module], activation: str) -> None:
    assert gated_mlp_of(mlp(kind, activation), torch.float32, CPU) is None


def test_replaced_linears_share_their_parameters() -> None:
    parent = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8)), nn.LayerNorm(8))
    parameters, wanted = list(parent.parameters()), parent(torch.ones(1, 8))
    replace_modules(parent, fast_linear_of)
    assert isinstance(parent[0], FastLinear) and isinstance(parent[1][0], FastLinear)
    assert isinstance(parent[2], nn.LayerNorm)
    assert all(a is b for a, b in zip(parameters, parent.parameters(), strict=True))
    assert torch.equal(parent(torch.ones(1, 8)), wanted)


def test_products_on_the_cpu_are_torchs() -> None:
    x, weight = torch.randn(1, 1, 8), torch.randn(4, 8)
    assert torch.equal(fast_linear(x, weight, None), nn.functional.linear(x, weight))
