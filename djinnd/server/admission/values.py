"""Checks of activations' values as clients send them: rows of little-endian floating-point numbers, examined as bits.

This works without numpy, for which the server has no other use. A piece of the bytes becomes one integer, and one
operation on it tests all values of the piece.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from djinn_client.protocol.fields.image import Dtype

_PIECE = 1 << 14  # bytes: an operation on integers of this size stays in the L1 cache


class _Form(NamedTuple):
    """The bits of a dtype.

    - `exponent`: these bits are all ones if a value is infinite or NaN.
    - `long`: at least one of these bits is set if the magnitude is 2**-63 or more. Then its square is a normal number
      in float32. The smallest magnitude of float16 is 2**-24, so for float16 these are all bits but the sign.
    """

    nbytes: int
    exponent: int
    long: int


_FORMS: dict[Dtype, _Form] = {
    "float32": _Form(4, 0x7F80_0000, 0x6000_0000),
    "bfloat16": _Form(2, 0x7F80, 0x6000),
    "float16": _Form(2, 0x7C00, 0x7FFF),
}


def first_unfinite(values: bytes, dtype: Dtype) -> int | None:
    """The index of the first value that is infinite or NaN; None if all are finite.

    Adding the lowest bit of the exponent to the masked exponent carries into the sign's place exactly if the exponent's
    bits are all ones. The sign bit was masked out, so the carry goes no further.
    """
    form = _FORMS[dtype]
    exponent, lowest = form.exponent, form.exponent & -form.exponent
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        count = len(piece) // form.nbytes
        masked = int.from_bytes(piece, "little") & _each(exponent, form.nbytes, count)
        signs = _each(1 << (8 * form.nbytes - 1), form.nbytes, count)
        carried = (masked + _each(lowest, form.nbytes, count)) & signs
        if carried:
            lowest_bit = (carried & -carried).bit_length() - 1
            return start // form.nbytes + lowest_bit // (8 * form.nbytes)
    return None


def has_direction(row: bytes, dtype: Dtype) -> bool:
    """True if the vector's length can be computed in float32: one of its values is 2**-63 or more."""
    form = _FORMS[dtype]
    return bool(int.from_bytes(row, "little") & _each(form.long, form.nbytes, len(row) // form.nbytes))


@lru_cache(8)
def _each(bits: int, nbytes: int, count: int) -> int:
    """An integer with these bits in each of `count` values."""
    return int.from_bytes(bits.to_bytes(nbytes, "little") * count, "little")
