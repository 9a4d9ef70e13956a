"""Loads a tile of GGUF's blocks and decodes it, as djinnd.weights.gguf.blocks does. Its comments have the formats.

The bytes of codes of a block count from 0, without its other bytes, so `run` and `inside` are as in tiles.py. The low
halves of a run lie in one sub-block, and so do the high halves.
"""

# ruff: noqa: SIM109 - Triton has no `in`

from __future__ import annotations

import triton
import triton.language as tl

from djinnd.model.kernels.coded.kinds import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from djinnd.model.kernels.coded.loads import load_part
from djinnd.model.kernels.coded.numbers import HIGH, LOW, WHOLE, less_zero, six_bits


@triton.jit
def load_blocks(
    blocks, halves, row, run, inside,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, PLAINLY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """→ the weights of the low columns, and of the high ones. blocks: uint8; halves: the same memory as float16."""
    CODES: tl.constexpr = 128 if KIND >= Q4_K else 32 if KIND == Q8_0 else 16  # bytes of codes in a block
    SIZE: tl.constexpr = STRIDE // (ROW // CODES)
    there = (run < ROW)[None, :]
    line = row.to(tl.int64)[:, None] * STRIDE + (run // CODES * SIZE)[None, :]
    place = run % CODES
    halves += row.to(tl.int64)[:, None] * (STRIDE // 2) + (run // CODES * (SIZE // 2))[None, :]
    OFFSETS: tl.constexpr = 2 if KIND == Q4_1 or KIND == Q5_1 else 0
    FIFTHS: tl.constexpr = 4 if KIND == Q5_0 or KIND == Q5_1 else 0
    K_HEAD: tl.constexpr = 16 if KIND == Q4_K else 48 if KIND == Q5_K else 0
    HEAD: tl.constexpr = K_HEAD if KIND >= Q4_K else 2 + OFFSETS + FIFTHS  # bytes before the codes
    within = ((run[:, None] + inside[None, :]) < ROW)[None, :, :]
    at = (place[:, None] + inside[None, :])[None, :, :]
    code = load_part(blocks + (line[:, :, None] + (at + HEAD)), within, MASKED)
    if KIND == Q8_0:
        weight = code.to(tl.int8, bitcast=True).to(tl.float32) * load_half(halves, 0, there, MASKED)
        return weight, weight
    elif KIND == Q6_K:
        high_bits = load_part(blocks + (line[:, :, None] + (at // 64 * 32 + at % 32 + 128)), within, MASKED)
        odd = (place % 64 // 32 * 255).to(tl.uint8)[None, :, None]
        scales = blocks + line + (place // 64 * 8 + place % 64 // 16 + 192)[None, :]
        d = tl.expand_dims(load_part(halves + 104, there, MASKED).to(tl.float32), 2)
        low_scale = load_part(scales, there, MASKED).to(tl.int8, bitcast=True).to(tl.float32)[:, :, None] * d
        high_scale = load_part(scales + 4, there, MASKED).to(tl.int8, bitcast=True).to(tl.float32)[:, :, None] * d
        low, high = six_bits(code, high_bits, odd, LOW, PLAINLY), six_bits(code, high_bits, odd, HIGH, PLAINLY)
        return low * low_scale, high * high_scale
    elif KIND >= Q4_K:
        sub = place // 32 * 2
        if KIND == Q5_K:
            fifth = load_part(blocks + (line[:, :, None] + (at % 32 + 16)), within, MASKED)
            low = code & 15 | (fifth >> sub[None, :, None] & 1) << 4
            high = code >> 4 | (fifth >> sub[None, :, None] + 1 & 1) << 4
            low = less_zero(low.to(tl.uint8), 0.0, WHOLE, PLAINLY)
            high = less_zero(high.to(tl.uint8), 0.0, WHOLE, PLAINLY)
        else:
            low, high = less_zero(code, 0.0, LOW, PLAINLY), less_zero(code, 0.0, HIGH, PLAINLY)
        d, m = load_half(halves, 0, there, MASKED), load_half(halves, 1, there, MASKED)
        low_scale, low_offset = load_sub_block(blocks + line, sub[None, :], there, MASKED)
        high_scale, high_offset = load_sub_block(blocks + line, sub[None, :] + 1, there, MASKED)
        low = low * (low_scale * d) - low_offset * m
        return low, high * (high_scale * d) - high_offset * m
    else:
        d = load_half(halves, 0, there, MASKED)
        ZERO: tl.constexpr = 8.0 if KIND == Q4_0 else 16.0 if KIND == Q5_0 else 0.0
        if KIND >= Q5_0:
            low, high = (code & 15).to(tl.int32), (code >> 4).to(tl.int32)
            BITS: tl.constexpr = 1 if KIND == Q5_0 else 2
            low |= (load_bits(halves, BITS, there, MASKED) >> at & 1) << 4
            high |= (load_bits(halves, BITS + 1, there, MASKED) >> at & 1) << 4
            low = less_zero(low.to(tl.uint8), ZERO, WHOLE, PLAINLY)
            high = less_zero(high.to(tl.uint8), ZERO, WHOLE, PLAINLY)
        else:
            low, high = less_zero(code, ZERO, LOW, PLAINLY), less_zero(code, ZERO, HIGH, PLAINLY)
        if KIND == Q4_1 or KIND == Q5_1:
            m = load_half(halves, 1, there, MASKED)
            return low * d + m, high * d + m
        else:
            return low * d, high * d


@triton.jit
def load_half(halves, number: tl.constexpr, there, MASKED: tl.constexpr):
    """→ float32 [ROWS, RUNS, 1]: this 16-bit float of each block."""
    return load_part(halves + number, there, MASKED).to(tl.float32)[:, :, None]


@triton.jit
def load_bits(halves, number: tl.constexpr, there, MASKED: tl.constexpr):
    """→ int32 [ROWS, RUNS, 1]: the 16 bits at this place of each block."""
    return load_part(halves + number, there, MASKED).to(tl.int16, bitcast=True).to(tl.int32)[:, :, None]


@triton.jit
def load_sub_block(blocks, sub, there, MASKED: tl.constexpr):
    """→ the scale and the offset of a sub-block of Q4_K or Q5_K, six bits each, float32 [ROWS, RUNS, 1]."""
    first = load_part(blocks + (sub % 4 + 4), there, MASKED)
    second = load_part(blocks + (sub % 4 + 8), there, MASKED)
    third = load_part(blocks + (sub % 4 + 12), there, MASKED)
    scale = tl.where(sub < 4, first & 63, third & 15 | first >> 6 << 4)
    offset = tl.where(sub < 4, second & 63, third >> 4 | second >> 6 << 4)
    return scale.to(tl.float32)[:, :, None], offset.to(tl.float32)[:, :, None]
