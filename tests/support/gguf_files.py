"""GGUF files for tests: any metadata and tensors as a file, and a checkpoint folder written as llama.cpp writes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ALIGNMENT = 32
_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}

Stored = tuple[int, tuple[int, ...], bytes]  # format, shape in torch's order, bytes


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored] = {}, version: int = 3) -> bytes:
    """A file with these values and tensors. Lists hold strings, whole numbers (as int32) or floats."""
    file = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        file += _string(key) + _value(value)
    placed, data = b"", b""
    for name, (form, shape, content) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        placed += _string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", form, len(data))
        data += content
    file += placed
    return file + bytes(-len(file) % ALIGNMENT) + data


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 5 if isinstance(value[0], int) else 6
        each = [_string(one) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", one) for one in value]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(each)
    number, form = _KINDS[type(value)]
    return struct.pack("<I", number) + struct.pack(form, value)


def f32(tensor: torch.Tensor) -> Stored:
    return 0, tuple(tensor.shape), tensor.float().contiguous().numpy().tobytes()


def quantised(tensor: torch.Tensor, form: str) -> Stored:
    """The tensor in one of the formats that the `gguf` package can write, or as zeros in another one."""
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    try:
        content = gguf.quants.quantize(tensor.float().numpy(), kind).tobytes()
    except NotImplementedError:
        weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
        content = bytes(tensor.numel() // weights * nbytes)
    return int(kind), tuple(tensor.shape), content


def write_as_gguf(
    folder: Path, path: Path, architecture: str, form: str = "F32", parts: tuple[Path, Path] | None = None
) -> dict[str, torch.Tensor]:
    """Writes the checkpoint in `folder` as llama.cpp's converter does, its matrices in `form`, to `path` or to two
    `parts`. → the parameters of transformers' model, by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder)
    tensors: dict[str, Stored] = {}
    for name, parameter in model.named_parameters():
        for written, tensor in _written(name, parameter.detach(), architecture, config, len(model.model.layers)):
            matrix = tensor.dim() > 1 and "ffn_gate_inp" not in written
            tensors[written] = quantised(tensor, form) if matrix and form != "F32" else f32(tensor)
    metadata, names = _metadata(config, architecture) | vocabulary(folder), list(tensors)
    if parts is None:
        path.write_bytes(gguf_bytes(metadata, tensors))
    else:
        parts[0].write_bytes(gguf_bytes(metadata, {name: tensors[name] for name in names[::2]}))
        parts[1].write_bytes(gguf_bytes({"split.no": 1}, {name: tensors[name] for name in names[1::2]}))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _written(name: str, tensor: torch.Tensor, architecture: str, config: Any, blocks: int) -> list[Any]:
    import gguf

    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, blocks)
    if name.endswith("experts.gate_up_proj"):
        block = name.split(".")[2]
        gate, up = tensor.chunk(2, dim=1)
        return [(f"blk.{block}.ffn_gate_exps.weight", gate), (f"blk.{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor)]
    stem, _, leaf = name.rpartition(".")
    if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    return [(f"{names.get_name(stem)}.{leaf}", tensor)]


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    told = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attention.key_length": getattr(config, "head_dim", None),
        "rope.freq_base": _theta(config),
        "expert_count": getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    known = {f"{architecture}.{key}": value for key, value in told.items() if value is not None}
    return {"general.architecture": architecture} | known


def _theta(config: Any) -> float:
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def vocabulary(folder: Path) -> dict[str, Any]:
    """The tokenizer of a folder with BPE over bytes as GGUF's metadata; none if the folder has no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return {}
    whole = json.loads(file.read_text())
    tokens = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].__getitem__)
    control = {each["id"] for each in whole["added_tokens"] if each["special"]}
    merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if number in control else 1 for number in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }


def numbers(*values: float) -> Stored:
    """A short list of F32."""
    return 0, (len(values),), np.array(values, np.float32).tobytes()
