"""Compares variants of each family's configuration with transformers, with sessions of many lengths at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    CohereConfig,
    FalconConfig,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HunYuanMoEV1Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.parameters import long_except

CONTEXT = 512
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT = COMMON | {"initializer_range": 0.2}  # large enough that logits differ
LLAMA = GPT | {"intermediate_size": 96, "num_key_value_heads": 2}
OPT = COMMON | {"init_std": 0.2, "ffn_dim": 96}
EXPERTS = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
WINDOW = {"sliding_window": 48, "layer_types": ALTERNATING}
LINEAR_AND_DEFAULT = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def longrope(frequencies: int, **more: Any) -> dict[str, Any]:
    """A configuration that promises eight times the positions of pretraining."""
    short = [1.0 + i / 8 for i in range(frequencies)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": [4.0] * frequencies}
    positions = {"max_position_embeddings": 8 * CONTEXT, "original_max_position_embeddings": CONTEXT}
    return {**LLAMA, **positions, "rope_parameters": rope | more}


VARIANTS: dict[str, PreTrainedConfig] = {
    # families of docs/reference/families.md
    "falcon: heads of their own, one branch after the other": FalconConfig(
        **GPT, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon: grouped heads, one norm (11B)": FalconConfig(
        **GPT, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "gpt-neox: one branch after the other": GPTNeoXConfig(**GPT, intermediate_size=96, use_parallel_residual=False),
    "opt: norms behind the branches (350m)": OPTConfig(**OPT, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt: no biases (Galactica)": OPTConfig(
        **OPT, enable_bias=False, layer_norm_elementwise_affine=False, word_embed_proj_dim=64
    ),
    "phi-3: longrope": Phi3Config(**longrope(8)),
    "phi-3: longrope of a part, tied head (4 mini)": Phi3Config(
        **longrope(6, partial_rotary_factor=0.75), tie_word_embeddings=True
    ),
    "gemma-3: scaled frequencies in some blocks (4B)": Gemma3TextConfig(
        **LLAMA, **WINDOW, head_dim=16, query_pre_attn_scalar=16, rope_parameters=LINEAR_AND_DEFAULT
    ),
    "qwen2: windows in some blocks": Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=48, max_window_layers=2
    ),
    "qwen3-moe: experts in every second block": Qwen3MoeConfig(**EXPERTS, decoder_sparse_step=2, head_dim=16),
    "gpt-oss: windows in every block": GptOssConfig(
        **LLAMA, head_dim=16, num_local_experts=4, layer_types=["sliding_attention"] * 4, sliding_window=48
    ),
    # families that need no code of their own
    "cohere": CohereConfig(**LLAMA, logit_scale=1.0),
    "gemma": GemmaConfig(**LLAMA, head_dim=16),
    "glm-4": Glm4Config(**LLAMA, head_dim=16),
    "gpt-bigcode": GPTBigCodeConfig(**GPT),
    "granite": GraniteConfig(  # no checkpoint has the default factors of 1; scores would drown in rounding
        **LLAMA, embedding_multiplier=12.0, attention_multiplier=1 / 16, residual_multiplier=0.22, logits_scaling=2.0
    ),
    "hunyuan moe": HunYuanMoEV1Config(**LLAMA, head_dim=16, num_experts=4, moe_topk=2),
    "olmo-3": Olmo3Config(**LLAMA, **WINDOW),
    "olmoe": OlmoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2),
    "phi": PhiConfig(**LLAMA),
    "qwen2-moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=32),
    "smollm-3": SmolLM3Config(**LLAMA),
    "stablelm": StableLmConfig(**LLAMA),
    "starcoder-2": Starcoder2Config(**LLAMA, sliding_window=48),
}


if "sarvam_moe" in CONFIG_MAPPING:  # one stored matrix of q, k and v; transformers 5.17 does not know it yet
    VARIANTS["sarvam moe"] = AutoConfig.for_model("sarvam_moe", **EXPERTS, head_dim=16, first_k_dense_replace=1)


# Norms behind the branches, RoPE by length, windows in some blocks, experts in some blocks, and two other families.
QUICK = (
    "opt: norms behind the branches (350m)",
    "phi-3: longrope of a part, tied head (4 mini)",
    "qwen2: windows in some blocks",
    "qwen3-moe: experts in every second block",
    "cohere",
    "gpt-bigcode",
)


@pytest.fixture(params=long_except(QUICK, VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_model(tmp_path / "model", VARIANTS[request.param])


def test_logits_and_tokens_equal_transformers(folder: Path) -> None:
    lengths = (1, 40, 150, 400)
    with Served(folder, plan=small_pages(120, max_context=CONTEXT), max_batch_tokens=48) as served:
        served.shuffle_pages()
        readers = [served.open() for _ in lengths]
        forwards = [served.submit(s, prompt(n)) for s, n in zip(readers, lengths, strict=True)]
        talker = served.open()
        served.submit(talker, prompt(44), max_tokens=16)
        served.run()
        for session, request in zip(readers, forwards, strict=True):
            wanted = torch.from_numpy(reference.logits(folder, session.tokens))
            assert wanted.std() > 0.3
            torch.testing.assert_close(served.logits_of(request), wanted, rtol=0, atol=1e-4)
    assert talker.tokens[44:] == reference.greedy(folder, prompt(44), 16)


def prompt(length: int) -> list[int]:
    return random_prompt(length, 512, seed=2)
