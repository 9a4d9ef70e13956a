"""The named shapes: each family's config.json as its checkpoint on the hub has it, and what a test-sized one changes.

The files are written in the hub's older spelling (`rope_theta` and `torch_dtype` at the top level) because that is what
loaders meet. Two things differ from the hub: the end-of-text id is that of the tokenizer written beside, and a reduced
shape has that tokenizer's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .tokenizer import END_OF_TEXT_ID

Config = dict[str, Any]

REDUCED_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """One checkpoint of the hub, without its weights."""

    config: Mapping[str, Any]
    reduced: Mapping[str, Any]  # entries of `config` that a test-sized model replaces
    leftovers: Literal["none", "causal masks", "rope frequencies"] = "none"  # buffers among the hub's weights
    reduced_gain: float = 1.5  # of the reduced model's random matrices; see random_weights


def config_of(name: str, *, dtype: str, reduced: bool = False, blocks: int | None = None) -> Config:
    """The contents of config.json for the shape `name`.

    `dtype` is torch's name of the weights' dtype; `blocks` replaces the number of blocks. ValueError: no such shape.
    """
    shape = shape_of(name)
    config = {**shape.config, **(shape.reduced if reduced else {})}
    config |= {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "torch_dtype": dtype}
    if blocks is not None:
        if blocks < 1:
            raise ValueError(f"a model needs at least 1 block, not {blocks}")
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = blocks
    return config


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"no shape is named {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def _llama(hidden: int, intermediate: int, blocks: int, heads: int, kv_heads: int, **more: Any) -> Config:
    """What the Llama-like families have in common; `more` adds to it and replaces."""
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


def _reduced_llama(kv_heads: int = 2, **more: Any) -> Config:
    return {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "vocab_size": REDUCED_VOCABULARY,
        "max_position_embeddings": 2048,
    } | more


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3 = _llama(4096, 14336, 32, 32, 8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0)
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "max_position_embeddings": 32768}
_QWEN_2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064}
_QWEN_3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}

SHAPES: Mapping[str, Shape] = {
    "llama-2-7b": Shape(_llama(4096, 11008, 32, 32, 32), _reduced_llama(kv_heads=4), "rope frequencies"),
    "llama-2-13b": Shape(_llama(5120, 13824, 40, 40, 40), _reduced_llama(kv_heads=4), "rope frequencies"),
    "llama-2-70b": Shape(_llama(8192, 28672, 80, 64, 8), _reduced_llama(), "rope frequencies"),
    "llama-3-8b": Shape(_LLAMA_3, _reduced_llama()),
    "llama-3.1-8b": Shape(
        _LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": _LLAMA_3_ROPE},
        _reduced_llama(rope_scaling=_LLAMA_3_ROPE | {"original_max_position_embeddings": 256}),
    ),
    "mistral-7b": Shape(
        _llama(4096, 14336, 32, 32, 8, **_MISTRAL, rope_theta=10000.0, sliding_window=4096),
        _reduced_llama(sliding_window=64),
    ),
    "mixtral-8x7b": Shape(
        _llama(4096, 14336, 32, 32, 8, **_MIXTRAL, rope_theta=1e6, sliding_window=None)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        _reduced_llama(intermediate_size=96, num_local_experts=4),
    ),
    "qwen2-7b": Shape(
        _llama(3584, 18944, 28, 28, 4, **_QWEN_2, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-6)
        | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        _reduced_llama(max_window_layers=4),
    ),
    "qwen3-8b": Shape(
        _llama(4096, 12288, 36, 32, 8, **_QWEN_3, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
        | {"head_dim": 128, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36},
        _reduced_llama(head_dim=32, max_window_layers=4),
    ),
    "gpt-j-6b": Shape(
        {
            "architectures": ["GPTJForCausalLM"],
            "model_type": "gptj",
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_inner": None,
            "rotary_dim": 64,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        {"vocab_size": REDUCED_VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
        reduced_gain=2.0,
    ),
    "gpt2": Shape(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
        },
        {"vocab_size": REDUCED_VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4},
        "causal masks",
        reduced_gain=2.0,
    ),
}
