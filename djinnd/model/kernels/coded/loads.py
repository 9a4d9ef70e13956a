"""Loads of codes and of x for the bytes of a tile (facts.py says which columns a byte has)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_part(pointer, there, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=there, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_wide_x(x, words, byte, SPAN: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr):
    """→ the numbers of `load_x` in float32. Both halves of a word of bfloat16 are float32 but for zeros."""
    if SPAN == 1 and x.dtype.element_ty == tl.bfloat16:
        word = load_part(words + byte, byte < ROW, MASKED)
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = load_x(x, words, byte, SPAN, ROW, MASKED)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_x(x, words, byte, SPAN: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr):
    """→ the numbers of a row of x for the low columns of these bytes, and for the high ones. words: x as int32, if its
    numbers have 16 bits. One word then has the numbers of a byte's neighbouring columns."""
    there = byte < ROW
    if SPAN == 0:
        value = load_part(x + byte, there, MASKED)
        return value, value
    elif SPAN == 1 and x.dtype.element_ty.primitive_bitwidth == 16:
        word = load_part(words + byte, there, MASKED)
        low = word.to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        return low, (word >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
    else:
        low = x + (byte // SPAN * (2 * SPAN) + byte % SPAN)
        return load_part(low, there, MASKED), load_part(low + SPAN, there, MASKED)
