"""The middle of a gated MLP, activation(gate) * up, in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * math.sqrt(2 / math.pi))
ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def gate_kernel(gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    raw = tl.load(gate + row * gate_row + at, mask=mask, other=0.0)
    u = tl.load(up + row * up_row + at, mask=mask, other=0.0).to(tl.float32)
    g = raw.to(tl.float32)
    if ACTIVATION == "silu":
        activated = g / (1.0 + tl.exp(-g))
    else:  # 0.5 (1 + tanh y) = 1 / (1 + exp -2y)
        inner = g + g * g * g * 0.044715
        activated = g / (1.0 + tl.exp(-(inner * TWICE_SQRT_2_OVER_PI)))
    tl.store(out + row * WIDTH + at, (activated.to(raw.dtype).to(tl.float32) * u).to(out.dtype.element_ty), mask=mask)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate, up [..., width] of one dtype → [..., width], contiguous: `activation` of gate, rounded, times up.

    Both may be parts of one product: only the last dimension needs a stride of 1, and the others must fold into one.
    """
    width = gate.shape[-1]
    rows_gate, rows_up = gate.view(-1, width), up.view(-1, width)
    assert gate.shape == up.shape and rows_gate.stride(1) == rows_up.stride(1) == 1
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_kernel[(len(rows_gate), triton.cdiv(width, BLOCK))](
        rows_gate, rows_up, out, rows_gate.stride(0), rows_up.stride(0),
        WIDTH=width, BLOCK=BLOCK, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip
    return out
