"""Loads a tile of coded weights and decodes it in registers, in float32 and in the order of the codings' own `decoded`.

A tile is [rows, runs, bytes of a run]: `row` int32 [ROWS], `run` int32 [RUNS], the first byte of each run, and `inside`
int32 [RUN], 0 to RUN - 1. A scale is loaded once for a row and run. Rows are within the matrix; bytes past its width
are masked if MASKED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from djinnd.model.kernels.coded.kinds import FP8, INT8, MXFP4
from djinnd.model.kernels.coded.numbers import from_e2m1, from_e4m3, from_e8m0


@triton.jit
def load_part(pointer, there, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=there, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_weights(
    codes, scales, third, fourth, row, run, inside, step,
    KIND: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    ORDER: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """→ the weights of the low columns, and of the high ones. If a byte is one column, both are the same."""
    there = run[None, :] < ROW
    byte = (run[:, None] + inside[None, :])[None, :, :]
    code = load_part(codes + row.to(tl.int64)[:, None, None] * ROW + byte, byte < ROW, MASKED)
    scale_row = (row // step).to(tl.int64)[:, None] * GROUPS
    scale = load_part(scales + (scale_row + run[None, :] // GROUP), there, MASKED)
    if KIND == FP8:
        weight = from_e4m3(code, NATIVE) * scale[:, :, None]
        return weight, weight
    elif KIND == INT8:
        weight = code.to(tl.float32) * scale[:, :, None]
        return weight, weight
    else:
        factor = from_e8m0(scale) if KIND == MXFP4 else from_e4m3(scale, NATIVE) * tl.load(third)
        return from_e2m1(code & 15) * factor[:, :, None], from_e2m1(code >> 4) * factor[:, :, None]
