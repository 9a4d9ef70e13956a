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

from djinnd.model.attention.chunks import attend_chunk
from djinnd.model.attention.gathering import tokens_in
from djinnd.model.attention.latents import Latents, attend_latents
from djinnd.model.attention.singles import attend_singles
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
    """Calls torch's attention once for rows of one token that see about as many, and once for each chunk. No row's
    result depends on the others. Used on the CPU, as reference for the kernels in tests, and on GPUs without the
    kernels."""

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        # Divided in each block: slots change where rows join or leave between blocks (engine/probes/partial_rows.py).
        at = batch.slots // keys.shape[1], batch.slots % keys.shape[1]
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
        starts, lengths = batch.on_host()
        out = torch.empty(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device)
        attend_singles(q, keys, values, batch, softmax, out)
        for row, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
            count = end - start
            if count <= 1:
                continue
            if k is None or v is None or length > count:
                pages = batch.pages_on_host()[row]
                row_k, row_v = (tokens_in(x, pages, length, q.dtype) for x in (keys, values))
            else:
                row_k, row_v = k[start:end], v[start:end]
            out[start:end] = attend_chunk(q[start:end], row_k, row_v, softmax)
        return out
