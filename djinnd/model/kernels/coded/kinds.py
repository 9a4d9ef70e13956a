"""The numbers by which kernels know a code."""

from __future__ import annotations

import torch
import triton.language as tl

FP8, INT8 = tl.constexpr(0), tl.constexpr(1)
BYTES, NIBBLES = tl.constexpr(2), tl.constexpr(3)  # unsigned integers of 8 and 4 bits, with zero points
MXFP4, NVFP4 = tl.constexpr(4), tl.constexpr(5)
PLAIN = tl.constexpr(-1)  # no code: experts/matrices.py

# A format of GGUF has its number in the file plus this. The order of the numbers is used: formats with K come last.
GGUF = tl.constexpr(100)
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = (tl.constexpr(GGUF.value + number) for number in (2, 3, 6, 7, 8))
Q4_K, Q5_K, Q6_K = (tl.constexpr(GGUF.value + number) for number in (12, 13, 14))

OF_CODES = {torch.float8_e4m3fn: FP8.value, torch.int8: INT8.value}
# Columns that share a scale, and `span` of facts.py, of the formats with kernels.
GGUF_RUNS = {2: (32, 16), 3: (32, 16), 6: (32, 16), 7: (32, 16), 8: (32, 0), 12: (64, 32), 13: (64, 32), 14: (32, 64)}
