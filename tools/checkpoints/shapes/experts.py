"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping

from tools.checkpoints.shapes.shape import Shape, llama, reduced_llama

_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "max_position_embeddings": 32768}
_QWEN_3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088}
_QWEN_3_5_MOE = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "vocab_size": 248320}
_GLM_4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552}
_DEEPSEEK_2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400}
_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

EXPERT_SHAPES: Mapping[str, Shape] = {
    "mixtral-8x7b": Shape(
        llama(4096, 14336, 32, 32, 8, **_MIXTRAL, rope_theta=1e6, sliding_window=None)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        reduced_llama(intermediate_size=96, num_local_experts=4),
    ),
    "qwen3-30b-a3b": Shape(
        llama(2048, 6144, 48, 32, 4, **_QWEN_3_MOE, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
        | {"head_dim": 128, "attention_bias": False, "sliding_window": None, "use_sliding_window": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48, "output_router_logits": False},
        # block 1 is dense: blocks of two layouts in one model
        reduced_llama(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
        | {"mlp_only_layers": [1], "max_window_layers": 4},
    ),
    "qwen3.6-35b-a3b": Shape(  # the text model: three blocks with a gated delta rule, one with attention
        llama(2048, 5632, 40, 16, 2, **_QWEN_3_5_MOE, max_position_embeddings=262144, rms_norm_eps=1e-6)
        | {
            "head_dim": 256,
            "attention_bias": False,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        }
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512}
        | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "output_router_logits": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        reduced_llama(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32, "layer_types": _THREE_TO_ONE},
    ),
    "glm-4.5-air": Shape(  # with a head that predicts several tokens, behind the last block
        llama(4096, 10944, 46, 96, 8, **_GLM_4_MOE, max_position_embeddings=131072, rope_theta=1e6)
        | {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1},
        reduced_llama(head_dim=32, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    ),
    "deepseek-v2-lite": Shape(  # latent attention: 576 numbers a token and block
        llama(2048, 10944, 27, 16, 16, **_DEEPSEEK_2, max_position_embeddings=163840, rope_theta=1e4, rms_norm_eps=1e-6)
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "attention_bias": False}
        | {"rope_scaling": _DEEPSEEK_YARN | {"original_max_position_embeddings": 4096}},
        reduced_llama(kv_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"rope_scaling": _DEEPSEEK_YARN | {"factor": 32, "original_max_position_embeddings": 64}},
    ),
    "gpt-oss-20b": Shape(  # as in the BF16 checkpoints: the original's experts are mxfp4
        llama(2880, 2880, 24, 64, 8, **_GPT_OSS, max_position_embeddings=131072, rope_theta=150000.0)
        | {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "rope_scaling": _YARN, "swiglu_limit": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "output_router_logits": False}
        | {"num_local_experts": 32, "num_experts_per_tok": 4},
        reduced_llama(intermediate_size=48, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
        | {"rope_scaling": _YARN | {"original_max_position_embeddings": 64}},
    ),
    "gpt-oss-120b": Shape(
        llama(2880, 2880, 36, 64, 8, **_GPT_OSS, max_position_embeddings=131072, rope_theta=150000.0)
        | {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "rope_scaling": _YARN, "swiglu_limit": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 18, "output_router_logits": False}
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        reduced_llama(intermediate_size=64, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
