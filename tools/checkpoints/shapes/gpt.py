"""Families that name things in GPT-2's way, or in one of their own."""

from __future__ import annotations

from collections.abc import Mapping

from tools.checkpoints.shapes.shape import REDUCED_VOCABULARY, Config, Shape


def _falcon(hidden: int, blocks: int, heads: int, **more: int) -> Config:
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "new_decoder_architecture": "num_kv_heads" in more,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    } | more


_REDUCED_FALCON = {
    "vocab_size": REDUCED_VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}

GPT_SHAPES: Mapping[str, Shape] = {
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
    "gpt-neox-20b": Shape(
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu_fast",
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "tie_word_embeddings": False,
        },
        {"vocab_size": REDUCED_VOCABULARY, "hidden_size": 64, "intermediate_size": 160}
        | {"num_hidden_layers": 4, "num_attention_heads": 4},
        "causal masks",
        reduced_gain=2.0,
    ),
    "opt-6.7b": Shape(
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 4096,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "pad_token_id": 1,
            "tie_word_embeddings": True,
        },
        # the smaller width of embeddings is that of opt-350m
        {"vocab_size": REDUCED_VOCABULARY, "hidden_size": 64, "ffn_dim": 160, "word_embed_proj_dim": 32}
        | {"num_hidden_layers": 4, "num_attention_heads": 4},
        reduced_gain=2.0,
    ),
    "falcon-7b": Shape(_falcon(4544, 32, 71), _REDUCED_FALCON, reduced_gain=2.0),
    "falcon-40b": Shape(
        _falcon(8192, 60, 128, num_kv_heads=8), _REDUCED_FALCON | {"num_kv_heads": 2}, reduced_gain=2.0
    ),
}
