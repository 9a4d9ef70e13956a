"""Codes → float32, exactly, in registers; and float32 → the dtype of weights.

The assembly works on the four bytes of a register at once. Each function decodes one half of the bytes: assembly with
two results would share no work, and the compiler could not move a tile's layout through it. PLAINLY: without assembly,
for Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

WHOLE, LOW, HIGH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of a byte

# A byte under the bits of 2**23 is the float32 2**23 + byte.
BIAS = tl.constexpr(8388608.0)
E2M1_UNIT = tl.constexpr(16384.0)  # 2**14


def _with_bias(codes: str) -> tl.constexpr:
    """Assembly: the bytes of `codes`, computed from $4 → float32 with BIAS in $0 to $3."""
    return tl.constexpr(f"""{{
        .reg .b32 codes, more;
        {codes}
        prmt.b32 $0, codes, 0x4b000000, 0x7440;
        prmt.b32 $1, codes, 0x4b000000, 0x7441;
        prmt.b32 $2, codes, 0x4b000000, 0x7442;
        prmt.b32 $3, codes, 0x4b000000, 0x7443;
    }}""")


def _e2m1(sign_and_rest: str, multiply: str = "") -> tl.constexpr:
    """Assembly: e2m1 → float16, two a word, in $0 and $1, in units of E2M1_UNIT. `sign_and_rest` computes from $2 the
    sign in the bits 0x80 of each byte of `sign`, and the rest in the bits 0x0e of `rest`. These are the first bytes of
    float16, but for the bias of the exponent, which the unit corrects. `multiply` may do that with $0 and $1."""
    return tl.constexpr(f"""{{
        .reg .b32 sign, rest, factor;
        {sign_and_rest}
        and.b32 sign, sign, 0x80808080;
        lop3.b32 rest, rest, 0x0e0e0e0e, sign, 0xea;
        prmt.b32 $0, rest, 0, 0x1404;
        prmt.b32 $1, rest, 0, 0x3424;
        {multiply}
    }}""")


_WHOLE_BYTES = _with_bias("mov.b32 codes, $4;")
_LOW_BYTES = _with_bias("and.b32 codes, $4, 0x0f0f0f0f;")
_HIGH_BYTES = _with_bias("shr.u32 codes, $4, 4; and.b32 codes, codes, 0x0f0f0f0f;")
# Q6_K: $5 has the two high bits of four groups. A byte of 0xff in $6 chooses an odd group.
_CHOOSE = "shr.u32 more, $5, 2; lop3.b32 more, more, $5, $6, 0xe4;"
_JOIN = "and.b32 codes, codes, 0x0f0f0f0f; lop3.b32 codes, more, 0x30303030, codes, 0xea;"
_LOW_SIX_BITS = _with_bias(f"{_CHOOSE} mov.b32 codes, $4; shl.b32 more, more, 4; {_JOIN}")
_HIGH_SIX_BITS = _with_bias(f"{_CHOOSE} shr.u32 codes, $4, 4; {_JOIN}")
_LOW_HALF, _HIGH_HALF = "shl.b32 sign, $2, 4; shl.b32 rest, $2, 1;", "mov.b32 sign, $2; shr.u32 rest, $2, 3;"
_MULTIPLY = "mov.b32 factor, 0x74007400; mul.rn.f16x2 $0, $0, factor; mul.rn.f16x2 $1, $1, factor;"
_LOW_E2M1, _LOW_E2M1_IN_UNITS = _e2m1(_LOW_HALF, _MULTIPLY), _e2m1(_LOW_HALF)
_HIGH_E2M1, _HIGH_E2M1_IN_UNITS = _e2m1(_HIGH_HALF, _MULTIPLY), _e2m1(_HIGH_HALF)


@triton.jit
def less_zero(code, zero, PART: tl.constexpr, PLAINLY: tl.constexpr):
    """→ float32: the unsigned integers in the bytes of `code`, or in a part of each byte, minus zero, an integer."""
    if PLAINLY:
        return (code & 15 if PART == LOW else code >> 4 if PART == HIGH else code).to(tl.float32) - zero
    else:
        biased = tl.inline_asm_elementwise(
            _LOW_BYTES if PART == LOW else _HIGH_BYTES if PART == HIGH else _WHOLE_BYTES,
            "=r,=r,=r,=r,r", [code], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        return biased.to(tl.float32, bitcast=True) - (zero + BIAS)


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
def six_bits(code, more, odd, PART: tl.constexpr, PLAINLY: tl.constexpr):
    """→ float32: the numbers of Q6_K minus 32. Four bits are in the LOW or HIGH halves of `code`, and two in `more`.

    odd: uint8, 255 for groups 1 and 3 of 32 weights, and 0 for groups 0 and 2.
    """
    if PLAINLY:
        joined = code & 15 | (more >> (odd & 2) & 3) << 4
        if PART == HIGH:
            joined = code >> 4 | (more >> (odd & 2) & 0x30)
        return joined.to(tl.float32) - 32.0
    else:
        biased = tl.inline_asm_elementwise(
            _LOW_SIX_BITS if PART == LOW else _HIGH_SIX_BITS,
            "=r,=r,=r,=r,r,r,r", [code, more, odd], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        return biased.to(tl.float32, bitcast=True) - (32.0 + BIAS)


@triton.jit
def from_e2m1(code, PART: tl.constexpr, IN_UNITS: tl.constexpr, PLAINLY: tl.constexpr):
    """Floats of 4 bits, in the LOW or HIGH halves of bytes → float32. IN_UNITS: divided by E2M1_UNIT, by which a
    product multiplies its sums instead of every weight."""
    if PLAINLY:
        bits = (code & 15 if PART == LOW else code >> 4).to(tl.int32)
        bits = (bits & 8) << 28 | (bits & 7) << 22
        number = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126 corrects the bias
        return number / E2M1_UNIT if IN_UNITS else number
    elif IN_UNITS:
        return tl.inline_asm_elementwise(
            _LOW_E2M1_IN_UNITS if PART == LOW else _HIGH_E2M1_IN_UNITS,
            "=r,=r,r", [code], tl.float16, is_pure=True, pack=4,
        ).to(tl.float32)  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _LOW_E2M1 if PART == LOW else _HIGH_E2M1, "=r,=r,r", [code], tl.float16, is_pure=True, pack=4
        ).to(tl.float32)


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
