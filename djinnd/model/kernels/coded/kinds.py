"""The numbers by which kernels know a code."""

from __future__ import annotations

import torch
import triton.language as tl

FP8, INT8 = tl.constexpr(0), tl.constexpr(1)
BYTES, NIBBLES = tl.constexpr(2), tl.constexpr(3)  # unsigned integers of 8 and 4 bits, with zero points
MXFP4, NVFP4 = tl.constexpr(4), tl.constexpr(5)

OF_CODES = {torch.float8_e4m3fn: FP8.value, torch.int8: INT8.value}
