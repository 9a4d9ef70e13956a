"""Gathers tokens of sessions from pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.model.fp8 import as_bytes


class Units(NamedTuple):
    """How x [pages, page_size, heads, width] is a list of equal units of numbers: the largest that divide both a token
    and the distance of two pages, as a rule whole tokens."""

    unit: int  # numbers
    per_page: int  # units from a page to the next one
    per_token: int

    def places(self, table: Tensor, at: Tensor, page_size: int) -> Tensor:
        """int64 [units]: the units of the tokens at positions `at` [..., tokens], with the page tables `table` [...,
        pages of a session]."""
        place = table.gather(-1, at // page_size).long() * self.per_page + at % page_size * self.per_token
        if self.per_token > 1:
            place = place[..., None] + torch.arange(self.per_token, device=at.device)
        return place.flatten()

    def take(self, x: Tensor, places: Tensor) -> Tensor:
        """The units of x at `places` → [tokens, heads, width], of its dtype."""
        pages, page_size, heads, width = x.shape
        units = (pages - 1) * self.per_page + page_size * self.per_token
        whole = as_bytes(x).as_strided((units, self.unit), (self.unit, 1))
        return whole.index_select(0, places).view(x.dtype).view(-1, heads, width)


def units_of(x: Tensor) -> Units:
    """x [pages, page_size, heads, width]: a page's tokens are contiguous, and its pages may be any distance apart."""
    token = x.shape[2] * x.shape[3]
    assert x.stride()[1:] == (token, x.shape[3], 1)
    unit = math.gcd(x.stride(0), token) if len(x) > 1 else token
    return Units(unit, x.stride(0) // unit, token // unit)


def gather_tokens(x: Tensor, table: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Gathers the tokens at positions `at` [..., tokens] from x [pages, page_size, heads, width], with the page tables
    `table` [..., pages of a session] → [..., tokens, heads, width], of `dtype`. Copies units, ten times as fast as by
    indexing pages."""
    units = units_of(x)
    return units.take(x, units.places(table, at, x.shape[1])).view(*at.shape, *x.shape[2:]).to(dtype)


def tokens_in(x: Tensor, pages: Sequence[int], length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` tokens of one session, from x [pages, page_size, heads, width] and the session's page table
    `pages` → [tokens, heads, width], of `dtype`. Tokens of one page are a view of it, if it has this dtype."""
    size = x.shape[1]
    parts = [x[page, : length - index * size] for index, page in enumerate(pages[: -(-length // size)])]
    if len(parts) == 1:
        return parts[0].to(dtype)
    return torch.cat([as_bytes(part) for part in parts]).view(x.dtype).to(dtype)
