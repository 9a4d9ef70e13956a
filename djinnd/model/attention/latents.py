"""Latent attention (MLA: DeepSeek, 2024) over pages.

The family computes one latent for a token, from which the keys and values of all heads are made, and a rotary key that
all heads share. The pages hold only these two: 576 numbers a token for DeepSeek V3, where keys and values are 40,960.
`expand_kv` is the family's own method that makes keys and values of them; `Latents` stands in its place and keeps what
it is given.

In PyTorch, earlier tokens are expanded again in each step, some at a time, so that memory stays bounded. The softmax
runs on through these pieces as in kernels/attention/tile.py. A GPU has kernels for that (latent_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from djinnd.model.attention.absorption import Absorption, Expand
from djinnd.model.attention.chunks import attend_chunk
from djinnd.model.attention.gathering import gather_tokens
from djinnd.model.fp8 import FP8, to_fp8
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.tuning import EXPANDED_BYTES


class Kernels(Protocol):
    """The ways of attention that replace the expansions of `attend_latents`. They read the pages of the same call."""

    def few(self, q: Tensor, batch: PagedBatch) -> Tensor:
        """q [tokens, heads, width] of rows with few tokens → [tokens, heads, value width]."""

    def many(self, q: Tensor, table: Tensor, length: int) -> Tensor:
        """q [queries, heads, width] of a row with `length` tokens in the pages of `table` [pages] → [queries, heads,
        value width]."""


class Latents:
    """Replaces `expand_kv` of one module. Keeps the latents of the step's tokens until attention takes them. Expands
    them unless attention absorbs the expansion."""

    def __init__(self, expand: Expand) -> None:
        self.expand = expand
        self.absorption: Absorption | None = None  # None: not known
        self._matrix: Callable[[], Tensor] | None = None
        self._is_absorbed: Callable[[], bool] = lambda: False
        self._given: tuple[Tensor, Tensor] | None = None
        self.is_expanded = True  # by the last call
        self.dtype: torch.dtype | None = None  # of the pages; FP8: numbers are rounded to it before they are expanded

    def absorb(self, matrix: Callable[[], Tensor], is_absorbed: Callable[[], bool]) -> None:
        """From now on keys and values are left out of a call if `is_absorbed` says that attention needs none.

        matrix: gives the weights of `absorption`, [outputs, rank], while the block computes.
        """
        assert self.absorption is not None
        self._matrix, self._is_absorbed = matrix, is_absorbed

    @property
    def can_be_absorbed(self) -> bool:
        return self._matrix is not None

    @property
    def matrix(self) -> Tensor:
        assert self._matrix is not None
        return self._matrix()

    def __call__(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        if self.dtype is FP8:
            latents, rotary = (to_fp8(x).to(x.dtype) for x in (latents, rotary))
        self._given = (latents, rotary)
        self.is_expanded = not (self.can_be_absorbed and self._is_absorbed())
        if self.is_expanded:
            return self.expand(latents, rotary)
        assert self.absorption is not None
        return self.absorption.unexpanded(latents)

    def take(self) -> tuple[Tensor, Tensor]:
        """The latents and rotary keys of the call, [1, 1, tokens, width] each."""
        given, self._given = self._given, None
        assert given is not None, "attention ran without expand_kv"
        return given


def keep_latents(module: nn.Module) -> Latents | None:
    """Puts Latents in the place of the module's `expand_kv`, once. None: the module has no latent attention."""
    found = getattr(module, "expand_kv", None)
    if found is None or isinstance(found, Latents):
        return found
    latents = Latents(found)
    module.expand_kv = latents  # type: ignore[assignment]
    return latents


def attend_latents(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    latents: Tensor,
    rotary: Tensor,
    batch: PagedBatch,
    softmax: Softmax,
    by: Latents,
    kernels: Kernels | None = None,
) -> Tensor:
    """q, k and v [tokens, heads, width] of this step, and a block's pages of latents and rotary keys [pages, page_size,
    1, width] → [tokens, heads, value width]. Reads the batch's lengths on the host.

    k, v: None if `by` left them out. kernels: None for attention in PyTorch.
    """
    assert softmax.is_plain, "latent attention has no softcap and no sinks"
    starts, lengths = batch.on_host()
    counts = [end - start for start, end in pairwise(starts)]
    if v is None:
        assert by.absorption is not None
        width = by.absorption.value
    else:
        width = v.shape[2]
    out = q.new_zeros(len(q), q.shape[1], width)
    pages = (latents, rotary)
    singles = [row for row, count in enumerate(counts) if count == 1]
    if singles:
        rows = torch.tensor(singles, device=q.device)
        tokens = batch.query_starts[rows].long()
        longest = max(lengths[row] for row in singles)
        if kernels is not None:
            out[tokens] = kernels.few(q[tokens], batch.singles(rows, longest))
        else:
            some = q[tokens].unsqueeze(2)  # [rows, heads, 1, width]
            table, of_rows = batch.page_table[rows], batch.kv_lengths[rows]
            found = _attend(some, pages, table, of_rows, longest, width, softmax, by.expand)
            out[tokens] = found[:, :, 0]
    for row, count in enumerate(counts):
        if count > 1:
            own = slice(starts[row], starts[row + 1])
            if k is not None and v is not None and lengths[row] == count:
                out[own] = attend_chunk(q[own], k[own], v[own], softmax)
                continue
            if kernels is not None:
                out[own] = kernels.many(q[own], batch.page_table[row], lengths[row])
                continue
            one, some = slice(row, row + 1), q[own].transpose(0, 1).unsqueeze(0)
            table, length = batch.page_table[one], batch.kv_lengths[one]
            found = _attend(some, pages, table, length, lengths[row], width, softmax, by.expand)
            out[own] = found[0].transpose(0, 1)
    return out


def _attend(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    longest: int,
    value_width: int,
    softmax: Softmax,
    expand: Expand,
) -> Tensor:
    """q [rows, heads, queries, width], the last tokens of their rows → [rows, heads, queries, value width]. `longest`:
    the largest of `lengths`."""
    rows, heads, queries, width = q.shape
    position = (lengths[:, None] - queries + torch.arange(queries, device=q.device))[:, None, :, None]
    peak = q.new_full((rows, heads, queries, 1), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(peak)
    acc = torch.zeros(rows, heads, queries, value_width, dtype=torch.float32, device=q.device)
    scaled = q.float() * softmax.scale
    piece = max(1, EXPANDED_BYTES // (rows * heads * 4 * (width + value_width + queries)))
    for start in range(0, longest, piece):
        at = torch.arange(start, min(start + piece, longest), device=q.device)
        place = torch.minimum(at, lengths[:, None] - 1)  # memory past the end of a row may hold NaN
        keys, values = expand(*(gather_tokens(x, table, place, q.dtype).transpose(1, 2) for x in pages))
        seen = at <= position
        if softmax.window:
            seen &= at > position - softmax.window
        if softmax.chunk:
            seen &= at >= position // softmax.chunk * softmax.chunk
        scores = (scaled @ keys.float().transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        reached = higher.clamp(min=torch.finfo(torch.float32).min)  # a row that has seen no key: -inf minus -inf is NaN
        weights, shrink = (scores - reached).exp(), (peak - reached).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ values.float()
        peak = higher
    return (acc / total).to(q.dtype)
