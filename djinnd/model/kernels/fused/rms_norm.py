"""RMSNorm in one kernel instead of seven."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    raw = tl.load(x + row + at, mask=mask, other=0.0)
    w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    wide = raw.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out + row + at, (normed.to(raw.dtype).to(tl.float32) * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] → [..., width], in the dtype of x * weight.

    Rounds as transformers' LlamaRMSNorm does: normalises in float32, casts to x's dtype, then multiplies by weight.
    """
    width = weight.numel()
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.result_type(x, weight), device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 1024, 1), 16)
    rms_norm_kernel[(x.numel() // width,)](x, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=warps)
    return out
