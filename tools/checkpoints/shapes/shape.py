"""Named shapes, and the common part of the Llama-like ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Config = dict[str, Any]

REDUCED_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """One checkpoint of the hub, without its weights."""

    config: Mapping[str, Any]
    reduced: Mapping[str, Any]  # entries of `config` that a test-sized model replaces
    leftovers: Literal["none", "causal masks", "rope frequencies"] = "none"  # buffers among the hub's weights
    reduced_gain: float = 1.5  # of the reduced model's random matrices; see random_models/weights.py


def llama(hidden: int, intermediate: int, blocks: int, heads: int, kv_heads: int, **more: Any) -> Config:
    """The common configuration of the Llama-like families; `more` adds to it and replaces."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | more


def reduced_llama(kv_heads: int = 2, **more: Any) -> Config:
    return {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "vocab_size": REDUCED_VOCABULARY,
        "max_position_embeddings": 2048,
    } | more
