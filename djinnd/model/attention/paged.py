"""Attention over paged KV: the interface, and its implementation in PyTorch.

A block's keys and values are [pages, page_size, kv_heads, head_dim], strided views of the page-major pool [pages,
blocks, 2, page_size, kv_heads, head_dim]. A row's page table names the pages of its session's tokens in order. Decode
rows (one token) and prefill chunks (many tokens, with or without history) are flattened into one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from djinnd.model.paged_batch import PagedBatch, Softmax


class PagedAttention(ABC):
    @abstractmethod
    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        """Writes k and v [tokens, kv_heads, head_dim] of this step to `batch.slots` of a block's keys and values.

        The last dimension of k and v has stride 1; the other strides are free.
        """

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, softmax: Softmax
    ) -> Tensor:
        """q [tokens, heads, head_dim], strided like k and v → [tokens, heads, head_dim], contiguous.

        k, v: this step's own, already written to the pages; a fresh row reads them instead of the pages.
        """


def attention_for(device: torch.device) -> PagedAttention:
    if device.type == "cuda":
        from djinnd.model.attention.triton_attention import TritonAttention  # Triton comes with CUDA builds of torch

        return TritonAttention(device)
    return TorchAttention()


class TorchAttention(PagedAttention):
    """Gathers the pages of each row and calls torch's attention. Used on the CPU, as reference for the kernels in
    tests, and on GPUs without the kernels."""

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        page_size = keys.shape[1]
        at = (batch.slots // page_size, batch.slots % page_size)
        keys.index_put_(at, k)
        values.index_put_(at, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, softmax: Softmax
    ) -> Tensor:
        starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        singles = [row for row, count in enumerate(counts) if count == 1]
        if singles:
            rows = None if len(singles) == len(counts) else torch.tensor(singles, device=q.device)
            _attend_singles(q, keys, values, batch, rows, softmax, out)
        for row, count in enumerate(counts):
            if count > 1:
                tokens = slice(starts[row], starts[row + 1])
                row_k, row_v = k[tokens], v[tokens]
                if lengths[row] > count:
                    at = torch.arange(lengths[row], device=q.device)
                    row_k, row_v = (_gather(x, batch.page_table[row], at) for x in (keys, values))
                out[tokens] = attend_chunk(q[tokens], row_k, row_v, softmax)
        return out


def _attend_singles(
    q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rows: Tensor | None, softmax: Softmax, out: Tensor
) -> None:
    """Computes the rows of one token in one call; `rows` None means all rows. Writes to `out`.

    Each row is padded to the longest with its own last token. Memory past the end of a row may hold NaN, which a weight
    of 0 would not hide.
    """
    table, lengths, tokens = batch.page_table, batch.kv_lengths[:, None], torch.arange(len(out), device=q.device)
    if rows is not None:
        table, lengths, tokens = table[rows], lengths[rows], batch.query_starts[rows].long()
    at = torch.arange(int(lengths.max()), device=q.device)
    seen = at < lengths
    if softmax.window:
        seen &= at >= lengths - softmax.window
    k, v = (_gather(x, table, torch.minimum(at, lengths - 1)).transpose(1, 2) for x in (keys, values))
    q = q[tokens]
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    if softmax.is_plain:
        # All heads of a group see the same keys, so they are passed as queries of their KV head.
        seen = seen[:, None, None, :]
        result = scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=softmax.scale)
    else:
        result = _step_by_step(grouped.unsqueeze(3), k, v, seen[:, None, None, None, :], softmax)
    out[tokens] = result.reshape(q.shape)


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


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Computes one row: q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] → like q."""
    queries, length, gqa = q.shape[0], k.shape[0], q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if queries == length and softmax.is_causal_only(length):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax.scale, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    position = torch.arange(length - queries, length, device=q.device)[:, None]
    at = torch.arange(length, device=q.device)
    seen = at <= position
    if softmax.window:
        seen &= at > position - softmax.window
    if softmax.is_plain:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax.scale, enable_gqa=gqa)
    else:
        out = _step_by_step(q.unflatten(1, (k.shape[1], -1)), k, v, seen, softmax).flatten(1, 2)
    return out[0].transpose(0, 1)


def _step_by_step(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: Softmax) -> Tensor:
    """q [rows, kv_heads, group, queries, head_dim], k and v [rows, kv_heads, keys, head_dim] → like q."""
    scores = q.float() @ k.unsqueeze(2).transpose(-1, -2).float() * softmax.scale
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(q.shape[1], q.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.unsqueeze(2).float()).to(q.dtype)
