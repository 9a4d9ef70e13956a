"""Indexers (DeepSeek V3.2 and its relatives): modules that pick the earlier tokens that attention reads.

An indexer picks a fixed number of tokens, such as 2,048. While a session is not longer, it picks all of them, and
attention is that of a model without indexers. So djinnd removes the indexers, reads no weights of theirs, and ends the
context at that number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from djinnd.model.attention.hf_attention import NoMask

FAMILIES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "minimax_m3_vl_text")

# Names of kinds of blocks with an indexer (`layer_types`). The second one is of transformers before 5.24.
KINDS = ("indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse")

# The argument in which GLM's blocks hand their picks on. Without indexers, no block reads it.
PICKS = "prev_topk_indices"


class Removed(nn.Module):
    """Takes the place of an indexer: it picks nothing, so attention reads all tokens."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def longest(config: Any) -> int | None:
    """The number of tokens up to which the indexers of a language model pick all. None: it has no indexers."""
    kinds = getattr(config, "layer_types", None) or ()
    if config.model_type not in FAMILIES or not set(KINDS) & set(kinds):
        return None
    if hasattr(config, "index_topk_blocks"):  # blocks of tokens are picked
        return int(config.index_topk_blocks * config.index_block_size)
    return int(config.index_topk)


def remove(blocks: Iterable[nn.Module]) -> None:
    """Replaces the indexers. A block of GLM's with `skip_topk` has none: it would use the picks of an earlier block."""
    for each in blocks:
        block: Any = each
        block.unread = (PICKS,)
        attention = block.self_attn
        if attention.indexer is not None or getattr(attention, "skip_topk", False):
            attention.indexer = Removed()
            attention.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(
    attention: nn.Module, given: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if arguments.get("attention_mask") is None:
        arguments = {**arguments, "attention_mask": NoMask()}  # the forward slices it for the indexer
    return given, arguments
