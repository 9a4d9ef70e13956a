"""KV in FP8 (djinnd.model.fp8.py), as kernels read and write it.

A GPU that converts FP8 itself gets pages as FP8. Any other gets them as bytes, and decodes these with integers; so the
type of a pointer says how to read it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.fp8 import FP8, as_bytes
from djinnd.model.kernels.coded.numbers import from_e4m3
from djinnd.model.kernels.launching.gpu import has_fp8


def readable(x: Tensor) -> Tensor:
    """Keys or values of any dtype, as `plain` expects them: a view."""
    return x if x.dtype is not FP8 or has_fp8(x.device) else as_bytes(x)


@triton.jit
def plain(x, dtype: tl.constexpr):
    """A tile of keys or values in the dtype of the queries."""
    if x.dtype == tl.uint8:
        return from_e4m3(x, False).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """Floats → uint8: the nearest e4m3, ties to even, and at most 448. NaN stays NaN."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    value = tl.minimum(size, 0x43E00000)  # 448.0; floats of one sign are ordered as integers
    # Below 2**-6, e4m3 counts in steps of 2**-9, as float32 does above 2**14: adding that rounds.
    small = (value.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = ((value + 0x7FFFF + (value >> 20 & 1)) >> 20) - (120 << 3)
    code = tl.where(value < 0x3C800000, small, large)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)
