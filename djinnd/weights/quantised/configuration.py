"""Finds the entry about a checkpoint's quantisation: in config.json, or in a file of ModelOpt."""

from __future__ import annotations

from typing import Any

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.weights.checkpoint import CONFIG, read_config, read_json

Told = dict[str, Any]

MODELOPT = "hf_quant_config.json"
_ENTRIES = ("quantization_config", "compression_config")


def quantisation_of(files: ModelFiles) -> Told:
    """The entry about quantisation; {} for plain weights. Raises ModelNotFound, ModelRejected."""
    config = read_config(files)
    for where in (config, config.get("text_config")):
        entries = [where[name] for name in _ENTRIES if where.get(name)] if isinstance(where, dict) else []
        if entries and not isinstance(entries[0], dict):
            raise ModelRejected(f"{CONFIG}: the entry about quantisation is not a JSON object", file=CONFIG)
        if entries:
            return dict(entries[0])
    return read_json(files, MODELOPT) | {"quant_method": "modelopt"} if MODELOPT in files else {}


def unquantised(config: Told) -> Told:
    """The configuration without its entries about quantisation."""
    plain = {name: value for name, value in config.items() if name not in _ENTRIES}
    text = plain.get("text_config")
    return plain | {"text_config": unquantised(text)} if isinstance(text, dict) else plain


def named_dtype(config: Told) -> str:
    """The dtype in which config.json says that the model computes; "" if it does not say."""
    for where in (config, config.get("text_config")):
        if isinstance(where, dict):
            named = where.get("dtype") or where.get("torch_dtype")
            if isinstance(named, str):
                return named.removeprefix("torch.")
    return ""
