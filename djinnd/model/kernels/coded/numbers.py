"""Small floats → float32, exactly, in registers; and float32 → the dtype of weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(byte, NATIVE: tl.constexpr):
    """FP8 (e4m3, no infinities) → float32. NATIVE: by the processor's own conversion."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Exponent and mantissa become the last bits of float32's exponent and its first bits of mantissa. The factor
        # corrects the bias, and makes numbers of both formats' subnormals.
        bits = byte.to(tl.int32)
        value = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36  # 2**120
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def from_e2m1(code):
    """Floats of 4 bits, in the low half of a byte or an integer → float32."""
    bits = code.to(tl.int32)
    bits = (bits & 8) << 28 | (bits & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126 corrects the bias


@triton.jit
def from_e8m0(byte):
    """The exponent of a power of two, plus 127 → float32. 255 is infinite, as in torch."""
    bits = byte.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal


@triton.jit
def rounded(value, dtype: tl.constexpr, PLAINLY: tl.constexpr):
    """float32 → dtype, to the nearest. PLAINLY: for Triton's interpreter, which cuts bits off for bfloat16."""
    if PLAINLY and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = tl.where(value == value, bits + 0x7FFF + (bits >> 16 & 1), bits)
        return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)
