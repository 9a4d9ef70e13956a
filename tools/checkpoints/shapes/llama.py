"""Dense families with Llama's way of naming things."""

from __future__ import annotations

from collections.abc import Mapping

from tools.checkpoints.shapes.shape import Shape, llama, reduced_llama

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3 = llama(4096, 14336, 32, 32, 8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0)
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
_QWEN_2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064}
_QWEN_3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "rope_theta": 1e4}
_GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144}
_PHI_3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32064, "pad_token_id": 0}
_OLMO_2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352}

LLAMA_SHAPES: Mapping[str, Shape] = {
    "llama-2-7b": Shape(llama(4096, 11008, 32, 32, 32), reduced_llama(kv_heads=4), "rope frequencies"),
    "llama-2-13b": Shape(llama(5120, 13824, 40, 40, 40), reduced_llama(kv_heads=4), "rope frequencies"),
    "llama-2-70b": Shape(llama(8192, 28672, 80, 64, 8), reduced_llama(), "rope frequencies"),
    "llama-3-8b": Shape(_LLAMA_3, reduced_llama()),
    "llama-3.1-8b": Shape(
        _LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": _LLAMA_3_ROPE},
        reduced_llama(rope_scaling=_LLAMA_3_ROPE | {"original_max_position_embeddings": 256}),
    ),
    "mistral-7b": Shape(
        llama(4096, 14336, 32, 32, 8, **_MISTRAL, rope_theta=10000.0, sliding_window=4096),
        reduced_llama(sliding_window=64),
    ),
    "qwen2-7b": Shape(
        llama(3584, 18944, 28, 28, 4, **_QWEN_2, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-6)
        | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        reduced_llama(max_window_layers=4),
    ),
    "qwen3-8b": Shape(
        llama(4096, 12288, 36, 32, 8, **_QWEN_3, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
        | {"head_dim": 128, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36},
        reduced_llama(head_dim=32, max_window_layers=4),
    ),
    "gemma-2-9b": Shape(
        llama(3584, 14336, 42, 16, 8, max_position_embeddings=8192)
        | _GEMMA
        | _GEMMA_2
        | {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reduced_llama(head_dim=32, query_pre_attn_scalar=32, sliding_window=64, attn_logit_softcapping=30.0),
        reduced_gain=4.0,
    ),
    "gemma-3-1b": Shape(
        llama(1152, 6912, 26, 4, 1, max_position_embeddings=32768)
        | _GEMMA
        | _GEMMA_3
        | {"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reduced_llama(kv_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=64, sliding_window_pattern=2),
        reduced_gain=5.0,
    ),
    "phi-3-mini-4k": Shape(
        llama(3072, 8192, 32, 32, 32, **_PHI_3, rope_theta=1e4)
        | {"original_max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
        reduced_llama(kv_heads=4, original_max_position_embeddings=2048, sliding_window=64),
    ),
    "olmo-2-7b": Shape(
        llama(4096, 11008, 32, 32, 32, **_OLMO_2, rope_theta=5e5, rms_norm_eps=1e-6), reduced_llama(kv_heads=2)
    ),
}
