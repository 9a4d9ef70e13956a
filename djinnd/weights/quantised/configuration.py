"""Finds and checks the entry about a checkpoint's quantisation: in config.json, or in a file of ModelOpt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.weights.checkpoint import CONFIG, read_config, read_json

Told = dict[str, Any]

MODELOPT = "hf_quant_config.json"
_NUMBER = re.compile("[0-9]{1,8}")
LARGEST = 1 << 20  # weights along a side of a block
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


# --- values of the entry --------------------------------------------------------------------------------------------


def refused(what: str, remedy: str) -> ModelRejected:
    return ModelRejected(f"the checkpoint is {what}, which is not served: {remedy}", file=CONFIG)


def choice(told: Told, name: str, served: Sequence[str]) -> str:
    """A value that must be one of those served, in any case of its letters; the first if it is absent. Raises
    ModelRejected."""
    value = told.get(name)
    if value is None:
        return served[0]
    known = {each.lower(): each for each in served}
    if not isinstance(value, str) or value.lower() not in known:
        raise refused(f"quantised with {name} {str(value)[:80]}", f"served are {', '.join(served)}")
    return known[value.lower()]


def whole_number(told: Told, name: str, least: int) -> int:
    """Raises ModelRejected for a number that no matrix has as a length."""
    value = told.get(name)
    if type(value) is not int or not least <= value <= LARGEST or value == 0:
        raise ModelRejected(f"{CONFIG}: {name} of the quantisation is {str(value)[:80]}, not a length", file=CONFIG)
    return value


def sides(block: Any) -> tuple[int, int]:
    """The sides of a block: a pair, or text such as 128x128. Raises ModelRejected."""
    pair = block.split("x", 2) if isinstance(block, str) else block
    if isinstance(pair, list | tuple) and len(pair) == 2:
        height, width = (int(each) if isinstance(each, str) and _NUMBER.fullmatch(each) else each for each in pair)
        if type(height) is int and type(width) is int and 0 < height <= LARGEST and 0 < width <= LARGEST:
            return height, width
    raise ModelRejected(f"{CONFIG}: the block size of the weights is {str(block)[:80]}, not two lengths", file=CONFIG)
