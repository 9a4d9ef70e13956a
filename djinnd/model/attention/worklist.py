"""The worklist: the rows of a batch that have tokens in this step, sorted for attention (kernels/attention/mixed.py).

    worklist  int32 [R, 4]  (row, its first token, its tokens in this step, its tokens in KV including this step's);
                          rows with a chunk come before rows with one token
    extent  int32 [4]     rows with a chunk, tokens of the longest chunk, rows with tokens, most tokens in KV of a row
                          with one token

Attention reads only these rows, and a program finds its work with one read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS, EXTENT = 4, 4

Integers = npt.NDArray[np.integer[Any]]


def fill_worklist(starts: Integers, lengths: Integers, worklist: Integers, extent: Integers) -> int:
    """Fills `worklist` and `extent` → the number of rows up to the last one with tokens.

    starts: [R + 1], cumulative token counts of the rows; a row may have no tokens.
    lengths: [R], tokens in KV.
    """
    counts = starts[1:] - starts[:-1]
    tokens, longest = int(starts[-1]), int(counts.max())
    rows = int(starts.searchsorted(tokens))
    if longest <= 1 and rows == tokens:  # a decode step: one token a row, without gaps
        worklist[:rows, 0] = worklist[:rows, 1] = np.arange(rows)
        worklist[:rows, 2] = 1
        worklist[:rows, 3] = lengths[:rows]
        extent[:] = (0, longest, rows, lengths[:rows].max(initial=0))
        return rows
    chunks, singles = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
    order = np.concatenate((chunks, singles))
    for column, of_row in enumerate((order, starts[order], counts[order], lengths[order])):
        worklist[: len(order), column] = of_row
    extent[:] = (len(chunks), longest, len(order), lengths[singles].max(initial=0))
    return rows
