"""Dry runs: a block runs on the meta device to its end, so that what its modules are asked for can be learnt.

Attention computes the shape of its result only. Stacked experts return their input, because the router's choice has no
values on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.attention.hf_attention import AttentionContext, BlockKV
from djinnd.model.attention.paged import PagedAttention
from djinnd.model.family.experts import stacked_parameters
from djinnd.model.paged_batch import PagedBatch


@contextmanager
def dry(block: nn.Module) -> Iterator[dict[str, BlockKV]]:
    """Within it, `block` can run on the meta device. → an empty BlockKV for the path of each module that may call
    attention; it counts the calls."""
    with ExitStack() as undo:
        for module in block.modules():
            if stacked_parameters(module) and not hasattr(module, "layer_idx"):
                module.forward = _as_given
                undo.callback(delattr, module, "forward")
        yield _give_attention(block, undo)


class _ShapeOnly(PagedAttention):
    """Attention that computes only the shape of its output."""

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        pass

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, *_: Any, **__: Any) -> Tensor:
        assert v is not None
        return torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)


def _give_attention(block: nn.Module, undo: ExitStack) -> dict[str, BlockKV]:
    nothing = torch.empty(0, device="meta")
    context = AttentionContext(
        _ShapeOnly(), PagedBatch(nothing, nothing, nothing, nothing, nothing, nothing, 0, 0, fresh=True)
    )
    paged = {}
    for path, module in block.named_modules():
        if hasattr(module, "layer_idx"):
            paged[path] = module.paged = BlockKV(context, nothing, nothing)
            undo.callback(delattr, module, "paged")
    return paged


def _as_given(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(hidden)
