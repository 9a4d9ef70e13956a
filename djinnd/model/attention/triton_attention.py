"""Attention over paged KV by djinnd's kernels. Importing this needs Triton, which comes with CUDA builds of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.model.attention.chunks import attend_chunk
from djinnd.model.attention.latent_kernels import LatentKernels
from djinnd.model.attention.latents import Latents, attend_latents
from djinnd.model.attention.paged import PagedAttention, TorchAttention
from djinnd.model.kernels.attention.decode import decode, fits_decode
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.latent_decode import MAX_QUERY
from djinnd.model.kernels.attention.mixed import mixed
from djinnd.model.kernels.launching.launches import UNAVAILABLE
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax


class TritonAttention(PagedAttention):
    """Attention by kernels that read the pages in place.

    Falls back to TorchAttention if the GPU or the compiler does not support a kernel. The kernels can be captured in a
    graph: their grids and addresses depend only on shapes and host bounds. TorchAttention reads lengths on the host and
    cannot be captured, so a model that needs it runs without graphs. Nor can steps that expand latents.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch = Scratch(device)
        self._reference = TorchAttention()
        self.has_latent_kernels = True  # until a launch fails

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        try:
            kv_write(k, v, keys, values, batch.slots)
        except UNAVAILABLE:
            self._reference.write(k, v, keys, values, batch)

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
            return self._attend_latents(q, k, v, (keys, values), batch, softmax, latents)
        rows = batch.kv_lengths.numel()
        if batch.fresh and k is not None and v is not None and rows == 1 and softmax.is_causal_only(q.shape[0]):
            return attend_chunk(q, k, v, softmax).contiguous()
        out = torch.empty(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device)
        kernel = decode if fits_decode(rows, batch.max_query, q.shape[1] // keys.shape[2]) else mixed
        try:
            kernel(q, keys, values, batch, out, self.scratch, softmax)
        except UNAVAILABLE:
            return self._reference.attend(q, k, v, keys, values, batch, softmax)
        return out

    def absorbs(self, batch: PagedBatch) -> bool:
        return self.has_latent_kernels and batch.max_query <= MAX_QUERY

    def _attend_latents(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        pages: tuple[Tensor, Tensor],
        batch: PagedBatch,
        softmax: Softmax,
        latents: Latents,
    ) -> Tensor:
        kernels = LatentKernels(pages, softmax, latents, self.scratch) if latents.can_be_absorbed else None
        try:
            if k is None:
                assert kernels is not None
                return kernels.few(q, batch)
            return attend_latents(
                q, k, v, *pages, batch, softmax, latents, kernels if self.has_latent_kernels else None
            )
        except UNAVAILABLE:
            self.has_latent_kernels = False
            return attend_latents(q, k, v, *pages, batch, softmax, latents)
