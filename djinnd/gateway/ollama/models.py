"""The daemon's models as Ollama describes its own. No I/O."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from djinn_client.protocol import ModelInfo, TokenizerInfo

_STARTED = datetime.now(UTC).isoformat()  # the daemon knows no time of a model's last change


def tag(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model": info.name,
        "modified_at": _STARTED,
        "size": info.weight_bytes,
        "digest": info.fingerprint or info.name,
        "details": details(info),
    }


def running(info: ModelInfo) -> dict[str, Any]:
    """Describes a loaded model. Clients expect an expiry time; in fact the model stays until its device memory is
    needed."""
    on_device = info.weight_bytes - info.streamed_bytes + info.kv_bytes
    expires = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    told = {"expires_at": expires, "size_vram": max(0, on_device), "context_length": info.max_context}
    return tag(info) | told


def details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.family,
        "families": [info.family] if info.family else [],
        "parameter_size": _parameters(info.parameters),
        "quantization_level": ", ".join(info.codes) or info.dtype,
    }


def shown(info: ModelInfo, tokenizer: TokenizerInfo) -> dict[str, Any]:
    family = info.family or "unknown"
    return {
        "modified_at": _STARTED,
        "license": "",
        "modelfile": f"FROM {info.name}",
        "parameters": "",
        "template": tokenizer.chat_template,
        "details": details(info),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": info.parameters,
            f"{family}.context_length": info.max_context,
            f"{family}.block_count": info.blocks,
            f"{family}.attention.head_count_kv": info.kv_heads,
        },
        "capabilities": capabilities(tokenizer),
    }


def capabilities(tokenizer: TokenizerInfo) -> list[str]:
    """Reads them off the chat template: one that takes tools mentions them."""
    found = ["completion", "embedding"]
    if "tools" in tokenizer.chat_template:
        found.append("tools")
    if "think" in tokenizer.chat_template or "reasoning" in tokenizer.chat_template:
        found.append("thinking")
    return found


def _parameters(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
