"""Runs of tokens and their hashes, for tables that remember where a run last occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FACTORS = (0x9E3779B97F, 0xC2B2AE3D27, 0x165667B19F)  # odd, 40 bits: with tokens of 20 bits, sums stay below 2^63
_SHIFT = 20  # the bits of a sum from here on depend on all bits of its tokens
RUN = len(_FACTORS)  # tokens of a run


def hash_of(tokens: Sequence[int], end: int) -> int:
    """The hash of the run that ends before position `end`, which is at least `RUN`."""
    a, b, c = tokens[end - RUN : end]
    return (a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) >> _SHIFT


def hashes_of(tokens: Sequence[int], first: int, end: int) -> np.ndarray:
    """The hashes of the runs that end before the positions from `first` to `end`, as int64."""
    ids = np.array(tokens[first - RUN : end], np.int64)
    sums = sum(ids[place : len(ids) - RUN + 1 + place] * factor for place, factor in enumerate(_FACTORS))
    return np.asarray(sums >> _SHIFT)
