"""Runs a family's forward as transformers does in the middle of a sequence: with a cache of earlier tokens, from which
the family takes positions and masks.

djinnd passes positions instead, and no mask. The check at load (far_positions.py) compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from djinnd.model.attention.hf_attention import paged_attention
from djinnd.model.family.adapter import Adapter, Prologue, PrologueDone

_NAME = "djinn_with_masks"  # attention implementation: paged attention, and masks that carry the rule they follow

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query position, key position → True if seen


class _Seen(DynamicCache):
    """A cache that reports `tokens` earlier tokens but holds none. Attention gets the new keys and values only."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # older transformers: positions
        return self._tokens + new, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.inference_mode()
def prologue_after(adapter: Adapter, ids: Tensor, seen: int) -> tuple[Prologue, list[Rule | None]]:
    """Runs the family's own prologue on `ids` [1, tokens] after `seen` earlier tokens → the blocks' inputs, and the
    rule of each block's mask. A rule is None if the family makes no mask by transformers' functions. The masks are
    removed from the arguments.

    Some families (Bamba, Falcon-H1) count from 0 with any cache, and rely on the positions that transformers'
    `generate` passes. These get positions, too.
    """
    own, rules = _prologue_after(adapter, ids, seen)
    if not seen or not _equal(own, _prologue_after(adapter, ids, 0)[0]):
        return own, rules
    positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
    return _prologue_after(adapter, ids, seen, position_ids=positions)


def _equal(one: Prologue, other: Prologue) -> bool:
    """Returns True if the inputs of all blocks are equal."""
    pairs = zip(tree_leaves([one.hidden, one.arguments]), tree_leaves([other.hidden, other.arguments]), strict=True)
    return all(not isinstance(mine, Tensor) or torch.equal(mine, its) for mine, its in pairs)


def _prologue_after(
    adapter: Adapter, ids: Tensor, seen: int, **positions: Tensor
) -> tuple[Prologue, list[Rule | None]]:
    cache, model = _Seen(seen), adapter.language_model
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with _masks(model.config), suppress(PrologueDone):
        model(input_ids=ids, use_cache=True, **{name: cache}, **positions)
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
    """Replaces transformers' sdpa_mask: an empty mask that carries its rule."""
    mask = torch.ones(1, 1, int(q_length), int(kv_length), dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask
