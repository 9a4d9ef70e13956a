"""Lists the kernels that a model needs, before anybody waits for them.

The list is what the model launches: a few passes over some of its blocks, with rows that are empty, in which launches
of kernels that are not compiled are noted and left out. So types, strides and constants are those of the model's own
modules over its own memory. Attention's kernels differ with the bounds of a batch, too; each call of attention is made
with all bounds that lead to another kernel.

A kernel that is left out leaves what was in its output. Nothing that is an index comes from one: inputs are zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from djinnd.device import Device
from djinnd.model import editing, token_masks
from djinnd.model.attention import PagedAttention, PagedBatch, TritonAttention
from djinnd.model.crossing import Inbox
from djinnd.model.graphs import CHUNK_TOKENS, KINDS
from djinnd.model.inputs import StepInputs
from djinnd.model.kernels import MAX_QUERY
from djinnd.model.kernels.launches import launches
from djinnd.model.kernels.variants import Variant
from djinnd.model.paged_model import PagedModel

log = logging.getLogger("djinnd.engine")

_TOKENS = (1, 8, 16)  # the most for which each kernel of a product with few rows serves
_KV_BOUNDS = (64, 256, 512, 1024, 2048)  # behind each of them, keys may be divided among more programs


def list_kernels(model: PagedModel, device: Device, max_tokens: int, max_kv: int) -> list[Variant]:
    """Of steps with up to `max_tokens` tokens and sessions of up to `max_kv`: those that are not in Triton's cache. To
    be called between steps."""
    with launches.listing() as listed:
        own = model.context.kernels
        model.context.kernels = EveryBound(own)
        try:
            for tokens in (max_tokens, *(few for few in _TOKENS if few < max_tokens)):
                _run_empty(model, device, tokens, max_kv)
            with device.computing():
                for width in (model.skeleton.points.width, model.vocab):
                    editing.warm_up(width, model.dtype, model.pool.device)
                token_masks.warm_up(model.vocab, model.dtype, model.pool.device)
                Inbox().read(torch.zeros(1, dtype=torch.int64, device=model.pool.device), lambda: False)
        except Exception as fault:  # the check at load says what is wrong with the model
            log.warning("kernels_not_listed family=%s error=%r", model.skeleton.family, fault)
            model.residency.restart()
        finally:
            model.context.kernels = own
            model.zero_pages([0])
    return [*listed]


def _run_empty(model: PagedModel, device: Device, tokens: int, max_kv: int) -> None:
    inputs = StepInputs(device, tokens, 1, 1)
    inputs.clear()
    blocks = range(min(KINDS, model.num_blocks))
    with device.computing(), torch.inference_mode():
        inputs.send()
        hidden = model.forward(inputs, max_query=tokens, max_kv=max_kv, fresh=False, blocks=blocks)
        model.logits(hidden, inputs.picks(min(tokens, max(_TOKENS))))
        device.synchronize()


class EveryBound(PagedAttention):
    """Calls attention with all bounds of a batch that may lead to other kernels, once for each kind of call: the first,
    which has the most tokens."""

    def __init__(self, own: PagedAttention) -> None:
        self._own = own
        self._seen: set[object] = set()

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        self._own.write(k, v, keys, values, batch)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, **options: Any
    ) -> Tensor:
        given = (keys, values)
        kind = (q.dtype, bool(options.get("window")), bool(options.get("softcap")), options.get("sinks") is None)
        if kind not in self._seen:
            self._seen.add(kind)
            apart = TritonAttention(q.device)  # memory between kernels is not kept for bounds that nobody has
            for tokens, bounds in _bounds(len(q), batch):
                apart.attend(q[:tokens], k[:tokens], v[:tokens], *given, bounds, **options)
        return self._own.attend(q, k, v, *given, batch, **options)


def _bounds(most: int, batch: PagedBatch) -> Iterator[tuple[int, PagedBatch]]:
    """→ how many of `most` tokens, and their batch."""
    lengths = [*(bound for bound in _KV_BOUNDS if bound < batch.max_kv), batch.max_kv]
    for max_kv in lengths:
        for queries in range(1, min(most, MAX_QUERY) + 1):
            yield queries, replace(batch, max_query=queries, max_kv=max_kv)
        for tokens in sorted({MAX_QUERY + 1, most, *CHUNK_TOKENS}):
            if MAX_QUERY < tokens <= most:
                for queries in {MAX_QUERY + 1, tokens}:
                    yield tokens, replace(batch, max_query=queries, max_kv=max_kv)
