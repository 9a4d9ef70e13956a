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


def fill_visits(starts: Integers, lengths: Integers, visits: Integers, extent: Integers) -> int:
    """`starts` [R + 1]: cumulative token counts of rows, of which some may bring none. `lengths` [R]: tokens in KV. →
    rows, behind the last of which none brings anything."""
    counts = starts[1:] - starts[:-1]
    tokens, longest = int(starts[-1]), int(counts.max())
    rows = int(starts.searchsorted(tokens))
    if longest <= 1 and rows == tokens:  # as decode steps are
        visits[:rows, 0] = visits[:rows, 1] = np.arange(rows)
        visits[:rows, 2] = 1
        visits[:rows, 3] = lengths[:rows]
        extent[:] = (0, longest, rows)
        return rows
    chunks, singles = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
    order = np.concatenate((chunks, singles))
    for column, of_row in enumerate((order, starts[order], counts[order], lengths[order])):
        visits[: len(order), column] = of_row
    extent[:] = (len(chunks), longest, len(order))
    return rows
