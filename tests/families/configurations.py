"""A reduced configuration of each model type: 4 blocks, a hidden size of 64, 300 tokens, windows of 64 tokens.

A field is set only if the type's own configuration has it. SPECIAL has what a family needs beyond that.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

BLOCKS, CONTEXT, VOCAB = 4, 1024, 300

_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "shared_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_hidden_layers": BLOCKS,
    "n_layer": BLOCKS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "sliding_window": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "attention_chunk_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "lru_width": 64,
    "pad_token_id": 0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "init_std": 0.1,
}

# Fields of the towers for images, audio and video.
_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "embed_dim": 64,
    "d_model": 64,
    "out_hidden_size": 64,
    "intermediate_size": 96,
    "mlp_dim": 96,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "projection_dim": 64,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [0],
}
# Tokens that stand for images and sounds, and ends of texts.
_TOKENS: dict[str, Any] = {
    "image_token_id": 290,
    "image_token_index": 290,
    "video_token_id": 291,
    "video_token_index": 291,
    "audio_token_id": 292,
    "boi_token_id": 293,
    "eoi_token_id": 294,
    "boi_token_index": 293,
    "eoi_token_index": 294,
    "vision_start_token_id": 295,
    "vision_end_token_id": 296,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "projection_dim": 64,
}

_MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    """Frequencies that are divided among time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope | more}


SPECIAL: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _sections(2, 3, 3),
    "qwen2_5_vl_text": _sections(2, 3, 3),
    "qwen2_5_omni_text": _sections(2, 3, 3),
    "paddleocr_vl_text": _sections(2, 3, 3),
    "glm4v_text": _sections(2, 3, 3),
    "glm_ocr_text": _sections(2, 3, 3),
    "glm4v_moe_text": _sections(1, 1, 2, partial_rotary_factor=0.5),
    "ernie4_5_vl_moe_text": {**_sections(2, 2, 4), "moe_intermediate_size": [32, 32]},
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "floor_scale": 32},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.9]},
    "glm4_moe_lite": _MLA,
    "longcat_flash": {**_MLA, "num_layers": 2, "zero_expert_num": 0},
    "minicpm3": _MLA,
    "mistral4": _MLA,
    "sarvam_mla": _MLA,
    "youtu": _MLA,
    "axk1": _MLA,
    "kimi_linear": {
        **_MLA,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
        "mlp_multipliers": [0.9, 1.3],
        "key_multiplier": 0.6,
        "attention_out_multiplier": 0.8,
        "ssm_out_multiplier": 1.4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 64},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "axk2": _MLA,
    "glm_moe_dsa": {**_MLA, "indexer_types": ["full", "shared"] * 2},
    "dots3_note_text": {
        **_MLA,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 16,
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "bailing_hybrid": _MLA,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "mamba": {"state_size": 8, "time_step_rank": 4, "use_mambapy": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "use_mambapy": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "recurrent_gemma": {"attention_window_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_types() -> list[str]:
    """The model types for which transformers has a causal language model, wrappers left out, sorted."""
    return sorted(t for t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if t in CONFIG_MAPPING and t not in wrapper_types())


def wrapper_types() -> list[str]:
    """The model types of multimodal models with a language model inside, sorted."""
    return sorted(t for t in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if t in CONFIG_MAPPING)


def reduced(model_type: str) -> PreTrainedConfig:
    """The reduced configuration of a model type. Raises what its class raises for a configuration of this size."""
    of = CONFIG_MAPPING[model_type]
    usual = of()
    fields = {name: value for name, value in _FIELDS.items() if _has(usual, name)}
    kinds = getattr(usual, "layer_types", None)
    if kinds and not isinstance(getattr(of, of.attribute_map.get("layer_types", "layer_types"), None), property):
        several = sorted(set(kinds), key=lambda kind: ("full" in kind or kind == "attention", kind))
        fields["layer_types"] = (several * BLOCKS)[:BLOCKS]
    config: PreTrainedConfig = of(**fields | SPECIAL.get(model_type, {}))
    return config


def _has(config: PreTrainedConfig, name: str) -> bool:
    return name in config.attribute_map or name in vars(config)


def reduced_wrapper(model_type: str) -> PreTrainedConfig:
    """The reduced configuration of a multimodal model: its language model and its towers are reduced alike."""
    of = CONFIG_MAPPING[model_type]
    usual = of()
    inner = {}
    for name in of.sub_configs:
        sub = getattr(usual, name, None)
        if sub is not None:
            is_text = sub is usual.get_text_config(decoder=True)
            inner[name] = (reduced(sub.model_type) if is_text else _tower(sub)).to_dict()
    outer = {name: value for name, value in _TOKENS.items() if _has(usual, name)}
    config: PreTrainedConfig = of(**inner, **outer, **SPECIAL.get(model_type, {}))
    return config


def _tower(usual: PreTrainedConfig) -> PreTrainedConfig:
    fields = {name: value for name, value in _TOWER.items() if _has(usual, name)}
    return type(usual)(**fields | SPECIAL.get(usual.model_type, {}))
