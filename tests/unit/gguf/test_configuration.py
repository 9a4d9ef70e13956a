from __future__ import annotations

from typing import Any

import pytest

from djinn_client.errors import ModelRejected
from djinnd.gguf.configuration import ROPE_FACTORS, make_configuration, token_ids
from djinnd.gguf.header import Header
from tests.support.gguf_files import gguf_bytes, numbers

SIZES = {
    "context_length": 131072,
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.5,
    "rope.freq_base": 500000.0,
}


def header_of(architecture: str, more: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Header:
    sizes = {f"{architecture}.{key}": value for key, value in SIZES.items()}
    placed = {"token_embd.weight": (0, (300, 64), bytes(300 * 64 * 4))} | (tensors or {})
    data = gguf_bytes({"general.architecture": architecture} | sizes | (more or {}), placed)
    return Header(lambda offset, count: data[offset : offset + count], len(data))


def configuration(header: Header, *floats: float) -> dict[str, Any]:
    return make_configuration(header, header.tensors, lambda name: floats)


def test_sizes_become_those_of_transformers() -> None:
    made = configuration(header_of("llama"))
    assert made == {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 0.5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_a_head_of_its_own_and_biases_are_seen_from_the_tensors() -> None:
    made = configuration(header_of("llama", tensors={"output.weight": numbers(1), "blk.0.attn_q.bias": numbers(1)}))
    assert not made["tie_word_embeddings"] and made["attention_bias"]


def test_experts_make_a_llama_a_mixtral() -> None:
    made = configuration(header_of("llama", {"llama.expert_count": 8, "llama.expert_used_count": 2}))
    assert (made["model_type"], made["num_local_experts"], made["num_experts_per_tok"]) == ("mixtral", 8, 2)


@pytest.mark.parametrize(("blocks", "scalar"), [(2, 32), (46, 16)])
def test_gemmas_of_27_billion_parameters_scale_attention_by_the_width_of_all_heads(blocks: int, scalar: int) -> None:
    made = configuration(header_of("gemma2", {"gemma2.block_count": blocks, "gemma2.attention.key_length": 32}))
    assert made["query_pre_attn_scalar"] == scalar


def test_the_divisors_of_llama_3_become_its_rule() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
    config = LlamaConfig(**shape, rope_parameters={**rule, "rope_theta": 500000.0})  # type: ignore[arg-type]
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = [500000.0 ** (-2 * index / 64) for index in range(32)]
    divisors = [free / scaled for free, scaled in zip(plain, frequencies.tolist(), strict=True)]
    header = header_of("llama", tensors={ROPE_FACTORS: numbers(*divisors)})
    found = configuration(header, *divisors)["rope_scaling"]
    assert found.pop("factor") == pytest.approx(rule.pop("factor"), rel=1e-5)
    assert found == rule
    with pytest.raises(ModelRejected, match="not those of Llama 3"):
        configuration(header, *divisors[:-1], 1.5)


def test_yarn_and_linear_scaling_are_kept_and_others_refused() -> None:
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    original = {"qwen2.rope.scaling.original_context_length": 32768}
    assert configuration(header_of("qwen2", yarn | original))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    with pytest.raises(ModelRejected, match="scales its rotary frequencies by longrope"):
        configuration(header_of("qwen2", {"qwen2.rope.scaling.type": "longrope"}))


def test_other_architectures_and_missing_values_are_refused_by_name() -> None:
    with pytest.raises(ModelRejected, match=r"architecture mamba are not served; served are gemma, .*qwen3moe"):
        configuration(header_of("mamba"))
    with pytest.raises(ModelRejected, match=r"lacks the value qwen3moe\.expert_count"):
        configuration(header_of("qwen3moe"))


def test_blocks_that_differ_are_refused() -> None:
    with pytest.raises(ModelRejected, match=r"blocks that differ in attention\.head_count_kv"):
        configuration(header_of("llama", {"llama.attention.head_count_kv": [0, 2]}))


def test_tokens_that_end_a_turn_count_as_ends() -> None:
    told = {"eos": 1, "eot": 106, "eom": 1, "bos": 2, "padding": 0}
    header = header_of("llama", {f"tokenizer.ggml.{key}_token_id": value for key, value in told.items()})
    assert token_ids(header) == {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106]}
