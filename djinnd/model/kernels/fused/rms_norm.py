"""RMSNorm in one kernel instead of seven to twelve, with the families' ways to multiply by a weight and by a gate."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

# How the normed numbers are multiplied by the weight: rounded to x's dtype before (Llama), in float32 (Olmo 2), or in
# float32 by 1 + weight (Gemma).
ROUNDED, WIDE, SHIFTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# A gate multiplies in float32: x by silu(gate) before the norm (Mamba 2), or the result by silu or sigmoid of the gate.
NO_GATE, BEFORE, SILU, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# Chosen: numbers of a program, and of a warp. A program for each head of 128 numbers took 41 µs for 2,048 tokens of 32
# heads on an H200, four times as long as their memory needs.
_NUMBERS = 1024


@dataclass(frozen=True, slots=True)
class NormKind:
    """The computation of a norm. groups: parts of a row that are normed alone."""

    scale: int = ROUNDED.value
    gate: int = NO_GATE.value
    groups: int = 1

    def dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of the result."""
        is_product = self.scale == ROUNDED.value and self.gate <= BEFORE.value
        return torch.promote_types(x, weight) if is_product else x


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x, weight, gate, out, eps, stride, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, GATE: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program norms AT_ONCE groups of rows. PARTS: groups of x that lie one behind another, `stride` numbers before
    the next ones. count: all groups."""
    nth = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    at = tl.arange(0, BLOCK)[None, :]
    mask = (nth < count)[:, None] & (at < WIDTH)
    there = nth.to(tl.int64)[:, None] * WIDTH + at
    raw = tl.load(x + ((nth // PARTS).to(tl.int64) * stride + nth % PARTS * WIDTH)[:, None] + at, mask=mask, other=0.0)
    w = tl.load(weight + (nth % GROUPS * WIDTH)[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    wide = raw.to(tl.float32)
    if GATE:
        gates = tl.load(gate + there, mask=mask, other=0.0).to(tl.float32)
        opened = 1 / (1 + tl.exp(-gates))
        if GATE != SIGMOID:
            opened *= gates
        if GATE == BEFORE:
            wide *= opened
    y = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    if SCALE == ROUNDED:
        y = (y.to(raw.dtype).to(tl.float32) * w).to(out.dtype.element_ty).to(tl.float32)
    elif SCALE == WIDE:
        y *= w
    else:
        y *= 1 + w
    if GATE > BEFORE:
        y *= opened
    tl.store(out + there, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind | None = None, gate: Tensor | None = None) -> Tensor:
    """x [..., width], weight [width], gate [..., width] if the kind has one → [..., width].

    Without a kind it rounds as transformers' LlamaRMSNorm does: it norms in float32, casts to x's dtype, and multiplies
    by the weight.
    """
    kind = kind or NormKind()
    width = weight.numel() // kind.groups
    x, parts, stride = by_parts(x, width)
    gates = x if gate is None else gate.expand(x.shape).contiguous()
    assert (gate is None) == (kind.gate == NO_GATE.value)
    out = torch.empty(x.shape, dtype=kind.dtype(x.dtype, weight.dtype), device=x.device)
    block = triton.next_power_of_2(width)
    at_once, warps, count = max(_NUMBERS // block, 1), min(max(block // _NUMBERS, 1), 16), x.numel() // width
    rms_norm_kernel[(triton.cdiv(count, at_once),)](
        x, weight, gates, out, eps, stride, count,
        WIDTH=width, BLOCK=block, SCALE=kind.scale, GATE=kind.gate, GROUPS=kind.groups, PARTS=parts, AT_ONCE=at_once,
        num_warps=warps,
    )  # fmt: skip
    return out


def by_parts(x: Tensor, width: int) -> tuple[Tensor, int, int]:
    """→ x, `parts`, `stride`: x has `parts` times `width` numbers one behind another, and the next ones begin `stride`
    numbers after the first. So queries or keys in the result of a joined product need no copy. Copies x if it is not
    of that form."""
    dense, outer = 1, [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    while outer and outer[-1][1] == dense:
        dense *= outer.pop()[0]
    while len(outer) > 1 and outer[-2][1] == prod(outer[-1]):
        size, stride = outer.pop()
        outer[-1] = (outer[-1][0] * size, stride)
    if len(outer) == 1 and dense % width == 0:
        return x, dense // width, outer[0][1]
    return x.contiguous(), 1, width
