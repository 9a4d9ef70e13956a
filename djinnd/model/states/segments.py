"""Segments: how a step's tokens pass through modules that keep a state.

A page has one state beside its KV: the state after the last token that has been computed in this page. So the state
before a token at position p is in the page of position p - 1; before position 0 it is zero. A row of a batch is cut at
the ends of pages, because the state there belongs to the page that ends:

    positions   250 ─────── 255 │ 256 ────────── 511 │ 512 ── 520       page size 256
    segment     reads page A,   │ reads page A,      │ reads page B,
                writes page A   │ writes page B      │ writes page C

Rows of one token go through a module together. Longer segments go one after another, as each needs the state of the
one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.model.paged_batch import PagedBatch


class Segment(NamedTuple):
    """Consecutive tokens of one row in one page."""

    first: int  # token in the batch
    tokens: int
    read: int | None  # the page with the state before the first token; None: zero
    write: int  # the page that gets the state after the last token


@dataclass(frozen=True, slots=True)
class Segments:
    """The tokens of one step. The tensors are on the device."""

    singles: Tensor | None  # int64 [n]: tokens of rows with one token; None: all tokens in order
    slots: Tensor  # int32 [n, 2]: the pages with each single's states (kernels/states/slots.py)
    longer: list[Segment]

    @property
    def has_tokens(self) -> bool:
        return bool(len(self.slots) or self.longer)


def cut(batch: PagedBatch, page_size: int) -> Segments:
    """Cuts a batch into segments. Reads its lengths and page tables on the host."""
    starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
    table = batch.page_table.tolist()
    singles: list[int] = []
    slots: list[tuple[int, int]] = []
    longer: list[Segment] = []
    for row, (first, end) in enumerate(pairwise(starts)):
        pages, position = table[row], lengths[row] - (end - first)
        if end - first == 1:
            before = pages[(position - 1) // page_size] if position else -1
            singles.append(first)
            slots.append((before, pages[position // page_size]))
            continue
        while first < end:
            page = position // page_size
            count = min(end - first, (page + 1) * page_size - position)
            read = pages[(position - 1) // page_size] if position else None
            longer.append(Segment(first, count, read, pages[page]))
            first, position = first + count, position + count
    device = batch.slots.device
    return Segments(
        torch.tensor(singles, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device).view(-1, 2),
        longer,
    )
