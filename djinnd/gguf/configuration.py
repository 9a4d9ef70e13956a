"""Makes the configuration that transformers would find in config.json from the metadata of a GGUF file.

The metadata name a model's sizes by keys that start with its architecture: "llama.block_count". Where the metadata are
silent and llama.cpp has a constant, the constant is here.

transformers has such tables, too, inside of functions that map a file into memory. Theirs leave out scaled rotary
frequencies, so that a Llama 3.1 would be wrong at all but short contexts; here they are read, or the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from djinn_client.errors import ModelRejected
from djinnd.gguf.header import GgufTensor, Header

Config = dict[str, Any]
Floats = Callable[[str], Sequence[float]]  # name of a small tensor of F32 → its numbers

ROPE_FACTORS = "rope_freqs.weight"  # by which the rotary frequencies of Llama 3 are divided


class Metadata:
    """The metadata of a file's architecture."""

    def __init__(self, header: Header, tensors: Mapping[str, GgufTensor], floats: Floats) -> None:
        """tensors: of all parts of the file. floats: reads a small one of them. Raises ModelRejected."""
        self.architecture = architecture_of(header)
        self.tensors = tensors
        self.floats = floats
        self._header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self._header.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Raises ModelRejected if there is no such value."""
        value = self.get(key)
        if value is None:
            raise self.refuse(f"lacks the value {self.architecture}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number that may also be an array with one number for each block, which must then be equal."""
        each = self._header.numbers(f"{self.architecture}.{key}")
        if each and all(value == each[0] for value in each):
            return int(each[0])
        if each is not None:
            raise self.refuse(f"has blocks that differ in {key}, which is not supported")
        value = self.get(key, default)
        if type(value) is not int:
            raise self.refuse(f"lacks the value {self.architecture}.{key}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def refuse(self, why: str) -> ModelRejected:
        return ModelRejected(f"the GGUF file of architecture {self.architecture} {why}", family=self.architecture)


def architecture_of(header: Header) -> str:
    """Raises ModelRejected for an architecture that djinnd does not serve from GGUF files."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _BUILDERS:
        raise ModelRejected(
            f"GGUF files of architecture {str(name)[:80]} are not served; served are {', '.join(sorted(_BUILDERS))}: "
            "load the checkpoint in safetensors that the file was made from",
            family=str(name)[:80],
        )
    return name


def make_configuration(header: Header, tensors: Mapping[str, GgufTensor], floats: Floats) -> Config:
    """The contents of config.json, from the metadata and `tensors` of a file. Raises ModelRejected, BadGguf."""
    metadata = Metadata(header, tensors, floats)
    return _common(metadata) | token_ids(header) | _BUILDERS[metadata.architecture](metadata)


def token_ids(header: Header) -> Config:
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, as far as the file names them. A model with several tokens
    that end a text or a turn gets a list of them."""
    found: Config = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int:
            found[name] = value
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(value for value in ends if type(value) is int))
    if ids:
        found["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return found


def _common(m: Metadata) -> Config:
    hidden, heads = m.count("embedding_length"), m.count("attention.head_count")
    embedding = m.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise m.refuse("has no tensor token_embd.weight")
    if heads < 1:
        raise m.refuse(f"has {heads} attention heads")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": m.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": m.count("attention.head_count_kv", heads),
        "head_dim": m.count("attention.key_length", hidden // heads),
        "intermediate_size": m.count("feed_forward_length", 0),
        "max_position_embeddings": m.count("context_length"),
        "rms_norm_eps": m.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": m.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(m),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
    }


def _rope_scaling(m: Metadata) -> Config | None:
    kind = m.get("rope.scaling.type", "none")
    if kind == "none":
        return _llama3_scaling(m) if m.has(ROPE_FACTORS) else None
    if kind == "linear":
        return {"rope_type": "linear", "factor": m.need("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": m.need("rope.scaling.factor"),
            "original_max_position_embeddings": m.count("rope.scaling.original_context_length"),
        }
    raise m.refuse(f"scales its rotary frequencies by {str(kind)[:40]}, which is not supported")


def _llama3_scaling(m: Metadata) -> Config:
    """Llama 3.1 and later: the file has only the divisors of the frequencies, from which the rule's four parameters are
    found. The largest divisor is the rule's factor; the other parameters are those of all Llama 3 models."""
    divisors = m.floats(ROPE_FACTORS)
    factor, low, high, original = max(divisors), 1.0, 4.0, 8192
    base = m.get("rope.freq_base", 10000.0)
    width = 2 * len(divisors)
    for index, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * base ** (2 * index / width)
        if wavelength < original / high:
            wanted = 1.0
        elif wavelength > original / low:
            wanted = factor
        else:
            share = (original / wavelength - low) / (high - low)
            wanted = 1 / ((1 - share) / factor + share)
        if not math.isclose(divisor, wanted, rel_tol=1e-4):
            raise m.refuse(f"has divisors of rotary frequencies in {ROPE_FACTORS} that are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# --- architectures -----------------------------------------------------------------------------------------------


def _llama(m: Metadata) -> Config:
    if m.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": m.count("expert_count"),
            "num_experts_per_tok": m.count("expert_used_count"),
        }
    bias = m.has("blk.0.attn_q.bias")
    return {"model_type": "llama", "attention_bias": bias, "mlp_bias": m.has("blk.0.ffn_up.bias")}


def _qwen2(m: Metadata) -> Config:
    return {"model_type": "qwen2"}


def _qwen3(m: Metadata) -> Config:
    return {"model_type": "qwen3"}


def _experts(m: Metadata) -> Config:
    return {
        "num_experts": m.count("expert_count"),
        "num_experts_per_tok": m.count("expert_used_count"),
        "moe_intermediate_size": m.count("expert_feed_forward_length"),
    }


def _qwen2moe(m: Metadata) -> Config:
    return _experts(m) | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": m.count("expert_shared_feed_forward_length"),
    }


def _qwen3moe(m: Metadata) -> Config:
    return _experts(m) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _gemma(m: Metadata) -> Config:
    return {"model_type": "gemma"}


def _attention_scalar(m: Metadata) -> int:
    """Gemma's models of 27 billion parameters (46 or 62 blocks) scale attention by another width than a head's."""
    width = m.count("embedding_length") // m.count("attention.head_count")
    return width if m.count("block_count") in (46, 62) else m.count("attention.key_length", width)


def _gemma2(m: Metadata) -> Config:
    return {
        "model_type": "gemma2",
        "sliding_window": m.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(m),
    }


def _gemma3(m: Metadata) -> Config:
    return {
        "model_type": "gemma3_text",
        "sliding_window": m.count("attention.sliding_window"),
        "rope_theta": m.get("rope.freq_base", 1_000_000.0),
        "query_pre_attn_scalar": _attention_scalar(m),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }


def _granite(m: Metadata) -> Config:
    return _llama(m) | {
        "model_type": "granite",
        "embedding_multiplier": m.get("embedding_scale", 1.0),
        "residual_multiplier": m.get("residual_scale", 1.0),
        "attention_multiplier": m.get("attention.scale", 1.0),
        "logits_scaling": m.get("logit_scale", 1.0),
    }


def _phi3(m: Metadata) -> Config:
    head = m.count("embedding_length") // m.count("attention.head_count")
    if m.has("rope_factors_long.weight"):
        raise m.refuse("has long and short rotary factors (longrope), which is not supported")
    return {
        "model_type": "phi3",
        "partial_rotary_factor": m.count("rope.dimension_count", head) / head,
        "sliding_window": m.get("attention.sliding_window") or None,
        "pad_token_id": None,  # the default is a token that small vocabularies lack
    }


def _smollm3(m: Metadata) -> Config:
    return {"model_type": "smollm3"}


_BUILDERS: dict[str, Callable[[Metadata], Config]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
}
