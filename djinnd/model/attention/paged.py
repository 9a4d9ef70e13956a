"""Attention over paged KV: the batch, and two implementations, torch's (CPU, reference) and Triton's (CUDA).

A block's keys and values are [pages, page_size, kv_heads, head_dim], strided views of the page-major pool [pages,
blocks, 2, page_size, kv_heads, head_dim]. A row's page table names the pages of its session's tokens in order. Decode
rows (one token) and prefill chunks (many tokens, with or without history) are flattened into one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from djinnd.model import kernels
except ModuleNotFoundError as missing:  # CPU builds of torch come without Triton
    if missing.name != "triton":
        raise


@dataclass(slots=True)
class PagedBatch:
    """Positions of a flattened batch's tokens in the paged KV.

    The tensors are on the device; a captured graph keeps their addresses. A row's queries are the last tokens of its
    KV: of n queries with `length` keys, query i is at position length - n + i.
    """

    query_starts: Tensor  # int32 [rows + 1], cumulative token counts
    kv_lengths: Tensor  # int32 [rows], tokens in KV including this step's
    page_table: Tensor  # int32 [rows, max_pages], page ids
    worklist: Tensor  # int32 [rows, 4]: see worklist.py
    extent: Tensor  # int32 [3]: see worklist.py
    slots: Tensor  # int64 [tokens], page * page_size + offset of each token of the batch
    max_query: int  # tokens of the longest row
    max_kv: int  # bound on kv_lengths; in a captured graph the model's maximum
    fresh: bool  # every row starts at position 0, so that there is no history to read


class Softmax(TypedDict, total=False):
    """A family's variant of softmax attention."""

    scale: Required[float]  # positive factor of the scores
    window: int  # how many tokens a query sees, including itself; 0: all tokens before it
    softcap: float  # scores become softcap * tanh(score / softcap) (Gemma 2); 0: scores are unchanged
    sinks: Tensor | None  # [heads]: one more logit in the denominator of the softmax, without a value (gpt-oss)


class PagedAttention(ABC):
    @abstractmethod
    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        """Writes k and v [tokens, kv_heads, head_dim] of this step to `batch.slots` of a block's keys and values.

        The last dimension of k and v has stride 1; the other strides are free.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        **softmax: Unpack[Softmax],
    ) -> Tensor:
        """q [tokens, heads, head_dim], strided like k and v → [tokens, heads, head_dim], contiguous.

        k, v: this step's own, already written to the pages; a fresh row reads them instead of the pages.
        """


def attention_for(device: torch.device) -> PagedAttention:
    return TritonAttention(device) if device.type == "cuda" else TorchAttention()


class TorchAttention(PagedAttention):
    """Gathers the pages of each row and calls torch's attention. Used on the CPU, as reference for the kernels in
    tests, and on GPUs without the kernels."""

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        page_size = keys.shape[1]
        at = (batch.slots // page_size, batch.slots % page_size)
        keys.index_put_(at, k)
        values.index_put_(at, v)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        **softmax: Unpack[Softmax],
    ) -> Tensor:
        variant = _Softmax(**softmax)
        starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        singles = [row for row, count in enumerate(counts) if count == 1]
        if singles:
            rows = None if len(singles) == len(counts) else torch.tensor(singles, device=q.device)
            longest = max(lengths[row] for row in singles)
            _attend_singles(q, keys, values, batch, rows, longest, variant, out)
        for row, count in enumerate(counts):
            if count > 1:
                tokens = slice(starts[row], starts[row + 1])
                row_k, row_v = k[tokens], v[tokens]
                if lengths[row] > count:
                    at = torch.arange(lengths[row], device=q.device)
                    row_k, row_v = (_gather(x, batch.page_table[row], at) for x in (keys, values))
                out[tokens] = variant.chunk(q[tokens], row_k, row_v)
        return out


def _attend_singles(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    rows: Tensor | None,
    longest: int,
    softmax: _Softmax,
    out: Tensor,
) -> None:
    """Computes the rows of one token in one call; `rows` None means all rows. Writes to `out`.

    Each row is padded to the longest with its own last token. Memory past the end of a row may hold NaN, which a weight
    of 0 would not hide.
    """
    table, lengths, tokens = batch.page_table, batch.kv_lengths[:, None], torch.arange(len(out), device=q.device)
    if rows is not None:
        table, lengths, tokens = table[rows], lengths[rows], batch.query_starts[rows].long()
    at = torch.arange(longest, device=q.device)
    seen = at < lengths
    if softmax.window:
        seen &= at >= lengths - softmax.window
    row_k, row_v = (_gather(x, table, torch.minimum(at, lengths - 1)) for x in (keys, values))
    out[tokens] = softmax.singles(q[tokens], row_k, row_v, seen)


def _gather(x: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """Gathers the tokens at positions `at` [..., tokens] from x [pages, page_size, kv_heads, head_dim], with the page
    tables `table` [..., pages of a session] → [..., tokens, kv_heads, head_dim].

    The pool is viewed as one list of tokens, in which consecutive pages of a block begin `per_page` tokens apart. Whole
    tokens are then copied, ten times as fast as by indexing pages.
    """
    (pages, page_size, kv_heads, head_dim), width = x.shape, x.stride(1)
    per_page, rest = divmod(x.stride(0), width)
    assert rest == 0 and width == kv_heads * head_dim and x.stride()[2:] == (head_dim, 1)
    tokens = x.as_strided(((pages - 1) * per_page + page_size, width), (width, 1))
    place = table.gather(-1, at // page_size) * per_page + at % page_size
    return tokens.index_select(0, place.flatten()).view(*place.shape, kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Computes attention with torch; the fields are those of Softmax."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def singles(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q [rows, heads, head_dim], k and v [rows, keys, kv_heads, head_dim], seen [rows, keys] → like q."""
        grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[2])
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self._is_plain:
            # All heads of a group see the same keys, so they are passed as queries of their KV head.
            mask = seen[:, None, None, :]
            return scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self.scale).reshape(q.shape)
        return self._step_by_step(grouped.unsqueeze(3), k, v, seen[:, None, None, None, :]).reshape(q.shape)

    def chunk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One row: q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] → like q."""
        queries, length, gqa = q.shape[0], k.shape[0], q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if queries == length and self.is_causal_only(length):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)
            return out[0].transpose(0, 1)
        position = torch.arange(length - queries, length, device=q.device)[:, None]
        at = torch.arange(length, device=q.device)
        seen = at <= position
        if self.window:
            seen &= at > position - self.window
        if self._is_plain:
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=gqa)
        else:
            out = self._step_by_step(q.unflatten(1, (k.shape[1], -1)), k, v, seen).flatten(1, 2)
        return out[0].transpose(0, 1)

    def is_causal_only(self, length: int) -> bool:
        return self._is_plain and not 0 < self.window < length

    @property
    def _is_plain(self) -> bool:
        return not self.softcap and self.sinks is None

    def _step_by_step(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q [rows, kv_heads, group, queries, head_dim], k and v [rows, kv_heads, keys, head_dim] → like q."""
        scores = q.float() @ k.unsqueeze(2).transpose(-1, -2).float() * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(q.shape[1], q.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights @ v.unsqueeze(2).float()).to(q.dtype)


class TritonAttention(PagedAttention):
    """Attention by djinnd's kernels (djinnd.model.kernels), which read the pages in place.

    Falls back to TorchAttention if the GPU or the compiler does not support a kernel. The kernels can be captured in a
    graph: their grids and addresses depend only on shapes and host bounds. TorchAttention reads lengths on the host and
    cannot be captured, so a model that needs it runs without graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch = kernels.Scratch(device)
        self._reference = TorchAttention()

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        try:
            kernels.kv_write(k, v, keys, values, batch.slots)
        except kernels.UNAVAILABLE:
            self._reference.write(k, v, keys, values, batch)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        **softmax: Unpack[Softmax],
    ) -> Tensor:
        rows = batch.kv_lengths.numel()
        variant = _Softmax(**softmax)
        if batch.fresh and rows == 1 and variant.is_causal_only(q.shape[0]):
            return variant.chunk(q, k, v).contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged = (q, keys, values, batch, out)
        is_short = kernels.fits_decode(batch.max_query, q.shape[1] // keys.shape[2])
        try:
            (kernels.decode if is_short else kernels.mixed)(*paged, self.scratch, **softmax)
        except kernels.UNAVAILABLE:
            return self._reference.attend(q, k, v, keys, values, batch, **softmax)
        return out
