"""Triton's interpreter, in which tests run kernels without a GPU: if this process has it, and products in it."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b. UPCAST converts to float32 first, because Triton's interpreter would multiply the raw bits of
    bfloat16."""
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
