"""Slots: where a step's rows have their states in the pool.

    slots int32 [rows, 2]    the page with the state before the token, -1: zeros │ the page for the state after it

A row may read one page and write another one, and several rows may read the same page. No two rows write the same page,
except for rows that are padding: they write to the scratch page, which is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def slots_of(slots, row, page):
    """→ whether there is an earlier state, and the elements from the start of the pool to both states of the row.

    page: elements from one page to the next.
    """
    read = tl.load(slots + row * 2)
    write = tl.load(slots + row * 2 + 1)
    return read >= 0, tl.maximum(read, 0).to(tl.int64) * page, write.to(tl.int64) * page


def page_stride(states: Tensor, slots: Tensor) -> int:
    """The elements from one page to the next. states: [pages, *shape], contiguous in a page; slots: int32
    [rows, 2]."""
    assert states[0].is_contiguous() and slots.is_contiguous() and slots.dim() == 2 and slots.shape[1] == 2
    return states.stride(0)
