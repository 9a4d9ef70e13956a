"""Rehearsal: lists the kernels that a model needs, so that they are compiled before a request waits for them.

The rehearsal runs a few passes over some blocks with empty rows. A launch of a kernel that is not compiled is noted and
skipped. So types, strides and constants are those of the model's own modules over its own memory. Attention's kernels
also differ with the bounds of a batch, so each call of attention is repeated with all bounds that lead to another
kernel.

A skipped kernel leaves its output unchanged. That is safe because no index comes from such an output: inputs are zeros.
The picks of a router are indices, so they are allocated as zeros here (kernels/experts/routing.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from djinnd.model.attention.latent_kernels import LatentKernels, rehearse_expanded
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.paged import PagedAttention
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.copies.pinned_io import ResultReader
from djinnd.model.kernels.attention.decode import AT_ONCE, MAX_QUERY
from djinnd.model.kernels.launching.launches import launches
from djinnd.model.kernels.launching.variants import Variant
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.sampling import token_masks
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHUNK_TOKENS, FEW_ROWS, KINDS
from djinnd.model.whitebox import editing

log = logging.getLogger("djinnd.engine")

_TOKENS = (1, 8, FEW_ROWS)  # the most rows of each kernel for products of few rows; experts have numbers of their own
_KV_BOUNDS = (64, 256, 512, 1024, 2048)  # above each of them, keys may be divided among more programs


def list_kernels(model: PagedModel, max_tokens: int, max_kv: int) -> list[Variant]:
    """Kernels that are not in Triton's cache, for steps of up to `max_tokens` tokens and sessions of up to `max_kv`
    tokens. Call it between steps."""
    with launches.listing() as listed:
        own = model.context.kernels
        model.context.kernels = EveryBound(own)
        try:
            few = {*_TOKENS, *model.placement.turning_rows}
            with model.placement.by_the_bus():  # MLPs that the host computes in some steps need kernels in others
                for tokens in (max_tokens, *sorted(each for each in few if each < max_tokens)):
                    _run_empty(model, tokens, max_kv)
            with model.device.computing():
                for width in (model.skeleton.points.width, model.vocab):
                    editing.warm_up(width, model.dtype, model.pool.device)
                token_masks.warm_up(model.vocab, model.dtype, model.pool.device)
                reader = ResultReader()
                reader.read(reader.ask(torch.zeros(1, dtype=torch.int64, device=model.pool.device)))
        except Exception as fault:  # the check at load reports the fault of the model
            log.warning("kernels_not_listed family=%s error=%r", model.skeleton.family, fault)
            model.placement.restart()
        finally:
            model.context.kernels = own
            model.zero_pages([0])
    return [*listed]


def _run_empty(model: PagedModel, tokens: int, max_kv: int) -> None:
    inputs = StepInputs(model.device, tokens, 1, 1, state_tokens=model.state_tokens)
    inputs.clear()
    blocks = range(min(KINDS, model.num_blocks))
    with model.device.computing(), torch.inference_mode():
        inputs.send()
        batch = inputs.paged_batch(max_query=tokens, max_kv=max_kv, fresh=False)
        hidden = model.forward(inputs, batch, blocks=blocks)
        model.logits(hidden, inputs.logit_rows(min(tokens, max(_TOKENS))))
        model.device.synchronize()


class EveryBound(PagedAttention):
    """Calls attention with all bounds of a batch that may lead to other kernels. It does so for the first call of each
    kind, which has the most tokens."""

    def __init__(self, own: PagedAttention) -> None:
        self._own = own
        self._seen: set[object] = set()

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        self._own.write(k, v, keys, values, batch)

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
        shape = (q.shape[1:], keys.shape[2:], values.shape[3], latents is None)
        kind = (q.dtype, shape, bool(softmax.window), bool(softmax.chunk), bool(softmax.softcap), softmax.sinks is None)
        if kind not in self._seen and (latents is None or latents.can_be_absorbed):
            self._seen.add(kind)
            apart = TritonAttention(q.device)  # scratch memory of its own, freed afterwards: these bounds are not real
            for tokens, bounds in _bounds(len(q), batch):
                if latents is None or apart.absorbs(bounds):
                    apart.attend(q[:tokens], None, None, keys, values, bounds, softmax, latents)
                else:
                    kernels = LatentKernels((keys, values), softmax, latents, apart.scratch)
                    rehearse_expanded(tokens, q, bounds, kernels)
        return self._own.attend(q, k, v, keys, values, batch, softmax, latents)

    def absorbs(self, batch: PagedBatch) -> bool:
        return self._own.absorbs(batch)


def _bounds(most: int, batch: PagedBatch) -> Iterator[tuple[int, PagedBatch]]:
    """→ pairs: a number of tokens, up to `most`, and the batch with the bounds to try."""
    lengths = [*(bound for bound in _KV_BOUNDS if bound < batch.max_kv), batch.max_kv]
    several = batch.kv_lengths[:1].expand(AT_ONCE + 1)  # more rows choose another kernel; `extent` has none of them
    for max_kv in lengths:
        yield 1, replace(batch, max_query=1, max_kv=max_kv, kv_lengths=several)
        for queries in range(1, min(most, MAX_QUERY) + 1):
            yield queries, replace(batch, max_query=queries, max_kv=max_kv)
        for tokens in sorted({MAX_QUERY + 1, most, *CHUNK_TOKENS}):
            if MAX_QUERY < tokens <= most:
                for queries in {MAX_QUERY + 1, tokens}:
                    yield tokens, replace(batch, max_query=queries, max_kv=max_kv)
