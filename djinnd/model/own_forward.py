"""A family's forward as transformers itself drives it, in the middle of a sequence: with a cache that has seen the
tokens before, from which the family takes positions and masks.

djinnd gives positions instead, and no mask. Whether that comes to the same is for the check at load to find.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from djinnd.model.adapter import Adapter, Prologue, PrologueDone
from djinnd.model.hf_attention import paged_attention

_NAME = "djinn_with_masks"  # our attention, and masks that say by which rule they are made

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, position of query, of key → whether it sees it


class _Seen(DynamicCache):
    """A cache that says it has tokens, and has none: attention is given the new ones."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # older ones give the positions
        return self._tokens + new, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.inference_mode()
def prologue_after(adapter: Adapter, ids: Tensor, seen: int) -> tuple[Prologue, list[Rule | None]]:
    """What the family's own forward makes of `ids` [1, tokens] behind `seen` tokens, and each block's mask; None: the
    family makes none in the way of transformers. The masks are taken out of the arguments."""
    cache, model = _Seen(seen), adapter.model
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with _masks(model.config), suppress(PrologueDone):
        model(input_ids=ids, use_cache=True, **{name: cache})
    prologue = adapter.recorded()
    rules = [getattr(arguments.get("attention_mask"), "rule", None) for arguments in prologue.arguments]
    for arguments in prologue.arguments:
        if "attention_mask" in arguments:
            arguments["attention_mask"] = None
    return prologue, rules


@contextmanager
def _masks(config: Any) -> Iterator[None]:
    AttentionInterface.register(_NAME, paged_attention)
    AttentionMaskInterface.register(_NAME, _mask)
    usual = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


def _mask(q_length: int, kv_length: int, mask_function: Rule, device: Any = None, **_: Any) -> Tensor:
    """In the place of transformers' sdpa_mask."""
    mask = torch.ones(1, 1, int(q_length), int(kv_length), dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask
