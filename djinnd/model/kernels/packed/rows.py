"""The rows of packed weights that a program of a product reads, their columns, and their patches.

Rows of whole groups are all alike. Rows of 64 times an odd number of columns begin at a group or in the middle of one,
in turns:

    row 0   low  high │ low  high │ low
    row 1                          high │ low  high │ low  high

A program has rows of one kind, STEP = 2 apart, so that all of them need the same columns of x. It reads whole groups.
The half of a group that is another row's is multiplied by 0: x has no columns there.

    low, high   columns j and j + 64 of a group, which share byte j of its nibbles
    shift       0, or 64 for rows that begin in the middle of a group: elements in front of the row that are read
"""

from __future__ import annotations

import triton
import triton.language as tl

from djinn_client.handover.packed import GROUP


def row_step(cols: int) -> int:
    """How far the rows of a program are apart: every STEP-th row begins at the same place of a group."""
    return 1 if cols % GROUP == 0 else 2


@triton.jit
def rows_of(program, rows, ROWS: tl.constexpr, STEP: tl.constexpr):
    """→ a program's first row, the last row that it may read, and its rows' shift. Its rows are STEP apart."""
    first = program // STEP * (STEP * ROWS) + program % STEP
    return first, rows - 1 - (rows - 1 - first) % STEP, program % STEP * 64


@triton.jit
def columns_there(pair, shift, ROW_PAIRS: tl.constexpr, STEP: tl.constexpr):
    """→ which pairs have their low column in the row, and which their high column. The comparisons are with `pair`
    itself, because the compiler then sees that neighbours are alike, and loads 16 bytes at a time."""
    if STEP == 1:
        return pair < ROW_PAIRS, pair < ROW_PAIRS
    else:
        return (pair >= shift) & (pair < ROW_PAIRS), pair < ROW_PAIRS - 64 + shift


@triton.jit
def load_bounds(stripes, first_row, end_row, STRIPE: tl.constexpr):
    """→ int32 [2]: begin and end of the patches of the stripes that hold these rows.

    The result is a tensor instead of two scalars so that the program does not wait for it here: the compiler moves
    scalars to uniform registers, and waits for the load to do so.
    """
    stripe = tl.where(tl.arange(0, 2) == 0, first_row // STRIPE, (end_row - 1) // STRIPE + 1)
    return tl.load(stripes + stripe)


@triton.jit
def patch_range(bounds, capacity):
    """→ (first, end), clamped to the patches, because the buffer's contents are not trusted."""
    bounds = tl.minimum(tl.maximum(bounds, 0), capacity)
    return tl.min(bounds, 0), tl.max(bounds, 0)


@triton.jit
def patch_values(index, bits, offset, base, COLS: tl.constexpr):
    """→ for each patch its row, its column, the right weight and the decoded weight (both bf16)."""
    place = index - offset.to(tl.uint32)
    decoded = (bits & 0x807F) | (base << 7)
    is_weight = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    was_weight = decoded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (place // COLS).to(tl.int32), (place % COLS).to(tl.int32), is_weight, was_weight
