"""The values of activations as clients send them: rows of little-endian floating-point numbers, looked at as bits.

Without numpy, which the server has no other use for: a piece of the bytes is one integer, and what is asked of each
value is asked of all values of the piece at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from djinn_client.image import Dtype

_PIECE = 1 << 14  # bytes: a step over integers of this size stays in the fastest cache


class _Form(NamedTuple):
    """`exponent`: the bits of a value that are all ones in what is infinite or no number. `long`: bits of which one at
    least is set where the magnitude is 2**-63 or more, so that its square is a normal number in float32; of float16,
    which has no smaller ones than 2**-24, any bit of it."""

    nbytes: int
    exponent: int
    long: int


_FORMS: dict[Dtype, _Form] = {
    "float32": _Form(4, 0x7F80_0000, 0x6000_0000),
    "bfloat16": _Form(2, 0x7F80, 0x6000),
    "float16": _Form(2, 0x7C00, 0x7FFF),
}


def first_unfinite(values: bytes, dtype: Dtype) -> int | None:
    """The index of the first value that is infinite or NaN; None where all are finite numbers.

    Where the exponent's bits are all ones, and nowhere else, adding the lowest of them carries into the sign's place,
    which is clear by then, and no further."""
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
    """Whether a vector is long enough for its length to be told in float32: one of its values is 2**-63 or more."""
    form = _FORMS[dtype]
    return bool(int.from_bytes(row, "little") & _each(form.long, form.nbytes, len(row) // form.nbytes))


@lru_cache(8)
def _each(bits: int, nbytes: int, count: int) -> int:
    """These bits in each of `count` values."""
    return int.from_bytes(bits.to_bytes(nbytes, "little") * count, "little")
