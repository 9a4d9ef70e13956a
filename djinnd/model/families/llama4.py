"""Llama 4: attention in chunks of tokens, and a temperature of attention that grows with the position.

Transformers tells the chunks to the mask alone, and djinnd has no masks: here the attention module gets their size. The
temperature counts the tokens of a cache and of the step, which is right for one sequence at a time. Here it gets the
position of each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _Positions:
    """Takes the place of transformers' cache: the tokens that it reports before the step's token i are position i less
    i, so that the family's own sum is each token's position. Attention gets the step's keys and values."""

    def __init__(self, positions: Tensor) -> None:
        """positions: int64 [1, tokens]."""
        self._positions = positions[0]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def adapt(blocks: Iterable[nn.Module]) -> None:
    for block in blocks:
        attention: Any = block.self_attn
        config = attention.config
        if config.layer_types[attention.layer_idx] == "chunked_attention":
            attention.attention_chunk = config.attention_chunk_size
        if attention.attn_temperature_tuning and not attention.use_rope:
            names = inspect.signature(inspect.unwrap(block.forward)).parameters
            cache = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
            block.register_forward_pre_hook(partial(_give_positions, cache), with_kwargs=True)


def _give_positions(
    cache: str, block: nn.Module, given: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if arguments.get(cache) is None:  # the check at load gives a cache
        arguments = {**arguments, cache: _Positions(arguments["position_ids"])}
    return given, arguments
