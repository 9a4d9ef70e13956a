"""Gathers a session's tokens from pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from djinnd.model.fp8 import as_bytes


def gather_tokens(x: Tensor, table: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Gathers the tokens at positions `at` [..., tokens] from x [pages, page_size, heads, width], with the page tables
    `table` [..., pages of a session] → [..., tokens, heads, width], of `dtype`.

    A page's tokens are contiguous in x; its pages may be any distance apart. The pool is viewed as one list of units,
    the largest that divide both a token and that distance, as a rule whole tokens. Units are then copied, ten times as
    fast as by indexing pages.
    """
    (pages, page_size, heads, width), token = x.shape, x.shape[2] * x.shape[3]
    assert x.stride()[1:] == (token, width, 1)
    unit = math.gcd(x.stride(0), token) if pages > 1 else token
    per_page, per_token = x.stride(0) // unit, token // unit
    units = as_bytes(x).as_strided(((pages - 1) * per_page + page_size * per_token, unit), (unit, 1))
    place = table.gather(-1, at // page_size).long() * per_page + at % page_size * per_token
    if per_token > 1:
        place = place[..., None] + torch.arange(per_token, device=x.device)
    return units.index_select(0, place.flatten()).view(x.dtype).view(*at.shape, heads, width).to(dtype)


def tokens_in(x: Tensor, pages: Sequence[int], tokens: range, dtype: torch.dtype) -> Tensor:
    """The tokens of one session at these positions, from x [pages, page_size, heads, width] and the session's page
    table `pages` → [tokens, heads, width], of `dtype`. Tokens of one page are a view of it, if it has this dtype."""
    size = x.shape[1]
    parts = [
        x[pages[index], max(tokens.start - index * size, 0) : tokens.stop - index * size]
        for index in range(tokens.start // size, -(-tokens.stop // size))
    ]
    if len(parts) == 1:
        return parts[0].to(dtype)
    return torch.cat([as_bytes(part) for part in parts]).view(x.dtype).to(dtype)
