"""Loads a tile of coded weights and decodes it in registers, in float32 and in the order of the codings' own `decoded`.

A tile is [ROWS, RUNS, RUN]: for each `row`, int32 [ROWS], the bytes of codes from `start` on, a multiple of a tile's
bytes. A scale is loaded once for a row and run. Rows are within the matrix; bytes past its width are masked if MASKED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from djinnd.model.kernels.coded.gguf_tiles import load_blocks
from djinnd.model.kernels.coded.kinds import BYTES, FP8, GGUF, INT8, MXFP4, NIBBLES, NVFP4
from djinnd.model.kernels.coded.loads import load_part, load_wide_x
from djinnd.model.kernels.coded.numbers import E2M1_UNIT, HIGH, LOW, WHOLE, from_e2m1, from_e4m3, from_e8m0, less_zero


@triton.jit
def load_weights(
    codes, scales, third, fourth, row, start, step,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, PLAINLY: tl.constexpr, RUNS: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """→ the weights of the low columns, and of the high ones. If a byte is one column, both are the same."""
    low, high, scale = load_numbers(
        codes, scales, third, fourth, row, start, step,
        KIND, ROW, STRIDE, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED, False,
    )  # fmt: skip
    if KIND >= GGUF or ORDER:
        return low, high
    else:
        return low * scale[:, :, None], high * scale[:, :, None]


@triton.jit
def unit_of(KIND: tl.constexpr):
    """The unit of the numbers that `load_numbers` gives IN_UNITS."""
    if KIND == MXFP4 or KIND == NVFP4:  # noqa: SIM109 - Triton has no `in`
        return E2M1_UNIT
    else:
        return 1.0


@triton.jit
def load_numbers(
    codes, scales, third, fourth, row, start, step,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, PLAINLY: tl.constexpr, RUNS: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr, IN_UNITS: tl.constexpr,
):  # fmt: skip
    """→ like `load_weights`, but without scales; and the scales, [ROWS, RUNS], with which a product multiplies the sum
    of a run instead of each weight. The scale is 1.0 where the weights of a run have scales of their own."""
    inside = tl.arange(0, RUN)
    run = start + tl.arange(0, RUNS) * RUN
    if KIND >= GGUF:
        low, high = load_blocks(codes, scales, row, run, inside, KIND, ROW, STRIDE, PLAINLY, MASKED)
        return low, high, 1.0
    else:
        there = run[None, :] < ROW
        byte = (run[:, None] + inside[None, :])[None, :, :]
        code = load_part(codes + row.to(tl.int64)[:, None, None] * ROW + byte, byte < ROW, MASKED)
        scale_row = (row // step).to(tl.int64)[:, None] * GROUPS
        if ORDER:
            low, high = load_ordered(
                code, scales, third, fourth, scale_row[:, :, None], byte, KIND, ROW, GROUPS, ZEROS, PLAINLY, MASKED
            )
            return low, high, 1.0
        else:
            # Neighbouring groups are loaded together only if the compiler sees that they are neighbours.
            group = start // GROUP + tl.arange(0, RUNS) if RUN == GROUP else run // GROUP
            at = scale_row + group[None, :]
            scale = load_part(scales + at, there, MASKED)
            if KIND == FP8:
                number = from_e4m3(code, NATIVE)
                return number, number, scale
            elif KIND == INT8:
                number = code.to(tl.float32)
                return number, number, scale
            elif KIND == BYTES or KIND == NIBBLES:  # noqa: SIM109 - Triton has no `in`
                zero = load_zero(third + at, there, KIND, ZEROS, MASKED)
                if ZEROS:
                    zero = zero[:, :, None]
                if KIND == BYTES:
                    number = less_zero(code, zero, WHOLE, PLAINLY)
                    return number, number, scale.to(tl.float32)
                else:
                    low, high = less_zero(code, zero, LOW, PLAINLY), less_zero(code, zero, HIGH, PLAINLY)
                    return low, high, scale.to(tl.float32)
            else:
                factor = from_e8m0(scale) if KIND == MXFP4 else from_e4m3(scale, NATIVE) * tl.load(third)
                low = from_e2m1(code, LOW, IN_UNITS, PLAINLY)
                return low, from_e2m1(code, HIGH, IN_UNITS, PLAINLY), factor


@triton.jit
def row_products(
    codes, scales, third, fourth, x, words, row, start, step,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, PLAINLY: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile by one row of x → float32 [ROWS, RUNS], in the unit that `unit_of` gives. A scale multiplies
    the sum of its run."""
    byte = (start + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :])[None, :, :]
    low_x, high_x = load_wide_x(x, words, byte, SPAN, ROW, MASKED)
    low, high, scale = load_numbers(
        codes, scales, third, fourth, row, start, step,
        KIND, ROW, STRIDE, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED, True,
    )  # fmt: skip
    products = low * low_x
    if SPAN:
        products += high * high_x
    return tl.sum(products, 2) * scale


@triton.jit
def load_zero(zeros, there, KIND: tl.constexpr, ZEROS: tl.constexpr, MASKED: tl.constexpr):
    """→ the zero points, float32, or the one number that all groups have."""
    if ZEROS:
        return load_part(zeros, there, MASKED).to(tl.float32)
    else:
        return 128.0 if KIND == BYTES else 8.0


@triton.jit
def load_ordered(
    code, scales, zeros, order, scale_row, byte,
    KIND: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, PLAINLY: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Weights of columns with groups by `order`. Numbers of groups are bounded, because the file's are not trusted."""
    column = byte if KIND == BYTES else byte * 2
    group = tl.minimum(tl.maximum(load_part(order + column, byte < ROW, MASKED), 0), GROUPS - 1)
    scale = load_part(scales + (scale_row + group), byte < ROW, MASKED).to(tl.float32)
    zero = load_zero(zeros + (scale_row + group), byte < ROW, KIND, ZEROS, MASKED)
    if KIND == BYTES:
        weight = less_zero(code, zero, WHOLE, PLAINLY) * scale
        return weight, weight
    else:
        low = less_zero(code, zero, LOW, PLAINLY) * scale
        group = tl.minimum(tl.maximum(load_part(order + column + 1, byte < ROW, MASKED), 0), GROUPS - 1)
        scale = load_part(scales + (scale_row + group), byte < ROW, MASKED).to(tl.float32)
        zero = load_zero(zeros + (scale_row + group), byte < ROW, KIND, ZEROS, MASKED)
        return low, less_zero(code, zero, HIGH, PLAINLY) * scale
