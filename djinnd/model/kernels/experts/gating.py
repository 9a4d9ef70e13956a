"""The activation between an expert's two products: of the numbers of a gate and of as many beside it (up).

    silu, gelu_tanh     activation(gate), rounded, times up
    clamped             clamped gate * sigmoid(alpha * gate) * (clamped up + 1), as gpt-oss has it
    relu_squared        the square of positive numbers, without a gate, as Nemotron-H has it

`reference` is the same in PyTorch, for trials of a family's own function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.coded.numbers import rounded
from djinnd.model.kernels.fused.gate import TWICE_SQRT_2_OVER_PI

# The first two have no gate.
NONE, RELU_SQUARED, SILU, GELU_TANH, CLAMPED = (tl.constexpr(number) for number in range(5))


@dataclass(frozen=True, slots=True)
class Activation:
    """kind: one of the numbers above. alpha, limit: of `clamped`. is_interleaved: rows of gate and up take turns in the
    first matrices; otherwise the rows of up come after those of gate."""

    kind: int
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        return self.kind > RELU_SQUARED.value


@triton.jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr, PLAINLY: tl.constexpr):
    """gate, up: of one dtype. The result has the same dtype."""
    dtype: tl.constexpr = gate.dtype
    g, u = gate.to(tl.float32), up.to(tl.float32)
    if KIND == CLAMPED:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        return rounded((u + 1.0) * (g / (1.0 + tl.exp(-(g * alpha)))), dtype, PLAINLY)
    else:
        if KIND == SILU:
            result = g / (1.0 + tl.exp(-g))
        else:  # 0.5 (1 + tanh y) = 1 / (1 + exp -2y)
            inner = g + g * g * g * 0.044715
            result = g / (1.0 + tl.exp(-(inner * TWICE_SQRT_2_OVER_PI)))
        return rounded(rounded(result, dtype, PLAINLY).to(tl.float32) * u, dtype, PLAINLY)


def reference(activation: Activation, both: Tensor) -> Tensor:
    """The result of the first product, [..., 2 * width] or without a gate [..., width] → [..., width], activated."""
    if activation.kind == RELU_SQUARED.value:
        return torch.relu(both).square()
    if activation.is_interleaved:
        gate, up = both[..., ::2], both[..., 1::2]
    else:
        gate, up = both.chunk(2, dim=-1)
    if activation.kind == CLAMPED.value:
        limit = activation.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))
    if activation.kind == SILU.value:
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
