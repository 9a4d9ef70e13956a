"""Which rows of a batch bring a chunk and which one token: attention (kernels/mixed.py) visits those and no others.

    visits  int32 [R, 4]  of a row that brings something: which it is, its first token, its tokens, its tokens in KV
                          once this step's are written; those that bring a chunk come first
    extent  int32 [3]     how many bring a chunk, tokens of the longest chunk, how many bring anything

A program finds in one read what it works on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

VISIT, EXTENT = 4, 3

Integers = npt.NDArray[np.integer[Any]]


def fill_visits(starts: Integers, lengths: Integers, visits: Integers, extent: Integers) -> None:
    """`starts` [R + 1]: cumulative token counts of rows, of which some may bring none. `lengths` [R]: tokens in KV."""
    counts = np.diff(starts)
    chunks, singles = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
    rows = np.concatenate((chunks, singles))
    for column, of_row in enumerate((rows, starts[rows], counts[rows], lengths[rows])):
        visits[: len(rows), column] = of_row
    extent[:] = (len(chunks), counts.max(), len(rows))
