"""y = W x for one token. It is bound by reading W once.

A program computes one row of W, with few warps that keep several 16-byte loads in flight each. There are enough
programs that some start while others add up. On an H200 a long enough launch reads W at 4.1 to 4.4 TB/s; cuBLAS's
choice for one row reads it at 3.4 to 4.0 TB/s (docs/log).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


@triton.jit
def matvec_kernel(x, weight, bias, out, IN: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0)
    weight += row.to(tl.int64) * IN
    at = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, IN // BLOCK * BLOCK, BLOCK):
        w = tl.load(weight + first + at, eviction_policy="evict_first")
        acc += w.to(tl.float32) * tl.load(x + first + at).to(tl.float32)
    if IN % BLOCK:
        last = IN // BLOCK * BLOCK + at
        w = tl.load(weight + last, mask=last < IN, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * tl.load(x + last, mask=last < IN, other=0.0).to(tl.float32)
    y = tl.sum(acc, 0)
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty))


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] of one row in all, weight [out, in] and bias [out] of one dtype → [..., out]. Sums in float32."""
    rows, width = weight.shape
    assert x.numel() == width and weight.is_contiguous()
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    matvec_kernel[(rows,)](
        x.contiguous(), weight, weight if bias is None else bias, out,
        IN=width, BLOCK=min(BLOCK, triton.next_power_of_2(width)), BIAS=bias is not None, num_warps=WARPS,
    )  # fmt: skip
    return out
