"""Decodes packed weights in registers (djinn_client.handover.packed has the format).

The assembly works on four weights at once. Its input is four bytes of sign and mantissa (`rest`) and four bytes of
nibbles; the low half of such a byte is the code of one weight, the high half that of another. A 32-bit operation
decodes two weights. Each function decodes one half of the groups. Assembly with two results would share no work, and
the compiler could not move a tile's layout through it.

Products decode relative to MIDDLE instead of the unit's base, so that all but the input is constant, and multiply their
sums by `window_scale`. That is exact, because windows hold only normal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIDDLE = tl.constexpr(112)  # base exponent from which a window neither over- nor underflows; a multiple of 16


def _pairs(high: bool, exponent: str) -> tl.constexpr:
    """Assembly: rest $2 and nibbles $3 → bf16, two a word, in $0 and $1. `exponent`: of code 0, in both halves of a
    word."""
    codes = "shr.u32 code, $3, 4; and.b32 code, code, 0x0f0f0f0f;" if high else "and.b32 code, $3, 0x0f0f0f0f;"
    return tl.constexpr(f"""{{
        .reg .b32 code, e0, e1, r0, r1;
        {codes}
        prmt.b32 e0, code, 0, 0x4140;
        prmt.b32 e1, code, 0, 0x4342;
        mad.lo.u32 e0, e0, 0x80, {exponent};
        mad.lo.u32 e1, e1, 0x80, {exponent};
        prmt.b32 r0, $2, 0, 0x1100;
        prmt.b32 r1, $2, 0, 0x3322;
        lop3.b32 $0, r0, 0x807f807f, e0, 0xea;
        lop3.b32 $1, r1, 0x807f807f, e1, 0xea;
    }}""")


def _words(high: bool) -> tl.constexpr:
    """Assembly: rest $4 and nibbles $5 → float32 in $0 to $3. Weights 0 and 2 share a word until the end, and so do 1
    and 3."""
    even, odd = ("shl.b32 e0, $5, 3;", "shr.u32 e1, $5, 5;") if high else ("shl.b32 e0, $5, 7;", "shr.u32 e1, $5, 1;")
    return tl.constexpr(f"""{{
        .reg .b32 e0, e1, r0, r1;
        {even}
        {odd}
        lop3.b32 e0, e0, 0x07800780, {MIDDLE.value << 7 | MIDDLE.value << 23}, 0xea;
        lop3.b32 e1, e1, 0x07800780, {MIDDLE.value << 7 | MIDDLE.value << 23}, 0xea;
        prmt.b32 r0, $4, 0, 0x2200;
        prmt.b32 r1, $4, 0, 0x3311;
        lop3.b32 r0, r0, 0x807f807f, e0, 0xea;
        lop3.b32 r1, r1, 0x807f807f, e1, 0xea;
        shl.b32 $0, r0, 16;
        shl.b32 $1, r1, 16;
        and.b32 $2, r0, 0xffff0000;
        and.b32 $3, r1, 0xffff0000;
    }}""")


_MIDDLE_PAIR = str(MIDDLE.value << 7 | MIDDLE.value << 23)
_LOW, _HIGH = _pairs(False, "$4"), _pairs(True, "$4")
_LOW_MIDDLE, _HIGH_MIDDLE = _pairs(False, _MIDDLE_PAIR), _pairs(True, _MIDDLE_PAIR)
_LOW_WORDS, _HIGH_WORDS = _words(False), _words(True)


@triton.jit
def decode(rest, nibbles, base, HIGH: tl.constexpr, PLAINLY: tl.constexpr):
    """rest and nibbles, uint8 of one shape → bf16 of the low halves of groups, or of the HIGH halves.

    base: int32, the exponent of code 0. PLAINLY: without assembly, for Triton's interpreter.
    """
    if PLAINLY:
        return decode_plainly(rest, nibbles, base, HIGH)
    else:
        return tl.inline_asm_elementwise(
            _HIGH if HIGH else _LOW,
            "=r,=r,r,r,r,r,r,r",
            [rest, nibbles, base * 0x00800080],
            tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def decode_middle(rest, nibbles, HIGH: tl.constexpr, PLAINLY: tl.constexpr):
    """Like `decode` with base MIDDLE."""
    if PLAINLY:
        return decode_plainly(rest, nibbles, MIDDLE, HIGH)
    else:
        return tl.inline_asm_elementwise(
            _HIGH_MIDDLE if HIGH else _LOW_MIDDLE, "=r,=r,r,r", [rest, nibbles], tl.bfloat16, is_pure=True, pack=4
        )


@triton.jit
def decode_wide(rest, nibbles, HIGH: tl.constexpr, PLAINLY: tl.constexpr):
    """Like `decode_middle`, but → float32, for products on the ordinary cores."""
    if PLAINLY:
        return decode_plainly(rest, nibbles, MIDDLE, HIGH).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            _HIGH_WORDS if HIGH else _LOW_WORDS, "=r,=r,=r,=r,r,r", [rest, nibbles], tl.int32, is_pure=True, pack=4
        ).to(tl.float32, bitcast=True)


@triton.jit
def decode_plainly(rest, nibbles, base, HIGH: tl.constexpr):
    code = nibbles >> 4 if HIGH else nibbles & 15
    rest = rest.to(tl.int32)
    bits = ((rest & 0x80) << 8) | (rest & 0x7F) | ((code.to(tl.int32) + base) << 7)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def window_scale(base):
    """→ float32: the factor that corrects sums of weights that were decoded relative to MIDDLE."""
    return ((base - MIDDLE + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_patches(patches, at, end):
    """→ index (uint32) and bits (int32) of patches `at`. From `end` on the index is 2**32 - 1."""
    there = at < end
    index = tl.load(patches + at * 2, mask=there, other=-1)
    bits = tl.load(patches + at * 2 + 1, mask=there, other=0)
    return index.to(tl.uint32, bitcast=True), bits & 0xFFFF
