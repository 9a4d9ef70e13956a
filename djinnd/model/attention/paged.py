"""Attention over paged KV: the interface, and its implementation in PyTorch.

A block's keys and values are [pages, page_size, kv_heads, width], strided views of the page-major pool, in the dtype of
queries or in FP8. The widths of keys and values may differ. A row's page table names the pages of its session's tokens
in order. Decode rows (one token) and prefill chunks (many tokens, with or without history) are flattened into one
batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from djinnd.model.attention.chunks import attend_chunk, attend_in_steps
from djinnd.model.attention.gathering import gather_tokens
from djinnd.model.attention.latents import Latents, attend_latents
from djinnd.model.fp8 import FP8, as_bytes, to_fp8
from djinnd.model.paged_batch import PagedBatch, Softmax


class PagedAttention(ABC):
    @abstractmethod
    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        """Writes k and v [tokens, kv_heads, width] of this step to `batch.slots` of a block's keys and values.

        The last dimension of k and v has stride 1; the other strides are free.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        softmax: Softmax,
        latents: Latents | None = None,
    ) -> Tensor:
        """q [tokens, heads, key width], strided like k and v → [tokens, heads, value width], contiguous.

        k, v: this step's own, already written to the pages; a fresh row reads them instead of the pages. None: it
        reads the pages, which an earlier block has written, or which hold rounded numbers (FP8).
        latents: the pages hold latents, and this makes keys and values of them. k and v are None if it left them out.
        """

    def absorbs(self, batch: PagedBatch) -> bool:
        """Returns True if latents need not be expanded for this batch."""
        return False


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
        for pages, new in ((keys, k), (values, v)):
            as_bytes(pages).index_put_(at, as_bytes(to_fp8(new) if pages.dtype is FP8 else new))

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        softmax: Softmax,
        latents: Latents | None = None,
    ) -> Tensor:
        if latents is not None:
            return attend_latents(q, k, v, keys, values, batch, softmax, latents)
        starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        out = torch.empty(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device)
        singles = [row for row, count in enumerate(counts) if count == 1]
        if singles:
            rows = None if len(singles) == len(counts) else torch.tensor(singles, device=q.device)
            _attend_singles(q, keys, values, batch, rows, softmax, out)
        for row, count in enumerate(counts):
            if count > 1:
                tokens = slice(starts[row], starts[row + 1])
                if k is None or v is None or lengths[row] > count:
                    at = torch.arange(lengths[row], device=q.device)
                    row_k, row_v = (gather_tokens(x, batch.page_table[row], at, q.dtype) for x in (keys, values))
                else:
                    row_k, row_v = k[tokens], v[tokens]
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
    if softmax.chunk:
        seen &= at >= (lengths - 1) // softmax.chunk * softmax.chunk
    k, v = (gather_tokens(x, table, torch.minimum(at, lengths - 1), q.dtype).transpose(1, 2) for x in (keys, values))
    q = q[tokens]
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    if softmax.is_plain:
        # All heads of a group see the same keys, so they are passed as queries of their KV head.
        seen = seen[:, None, None, :]
        result = scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=softmax.scale)
    else:
        result = attend_in_steps(grouped.unsqueeze(3), k, v, seen[:, None, None, None, :], softmax)
    out[tokens] = result.reshape(len(q), out.shape[1], out.shape[2])
