"""The quantisation methods that djinnd reads: their entries in config.json, and their forms of stored matrices.

The stored tensors decide: lists of modules that stay plain are not looked at. The quantisation of activations is not
applied: djinnd computes with the decoded weights in the checkpoint's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.quantised.coded import Form
from djinnd.weights.quantised.compressed_tensors import compressed_tensors
from djinnd.weights.quantised.configuration import Told, choice, refused, sides, whole_number
from djinnd.weights.quantised.float4 import BlocksForm, PairsForm
from djinnd.weights.quantised.grouped import AwqForm, GptqForm, Groups
from djinnd.weights.quantised.scaled import ScaledForm


def forms_of(told: Told) -> tuple[str, list[Form]]:
    """The method's name, and its forms. Raises ModelRejected for a method that is not served, with those that are."""
    method = str(told.get("quant_method"))[:80]
    read = METHODS.get(method)
    if read is None:
        raise refused(f"quantised by {method}", f"served are {', '.join(METHODS)}, GGUF files, and plain weights")
    return method, read(told)


def _fp8(told: Told) -> list[Form]:
    block = told.get("weight_block_size")
    return [ScaledForm("_scale_inv", block=None if block is None else sides(block))]


def _gptq(told: Told) -> list[Form]:
    form = choice(told, "checkpoint_format", ("gptq", "gptq_v2"))
    layers = told.get("dynamic") or {}
    if not isinstance(layers, dict) or not all(str(name).startswith("-:") for name in layers):
        raise refused("quantised by gptq with settings for single layers (dynamic)", "use one with the same for all")
    kind = Groups(_bits(told, (4, 8)), _group(told))
    return [GptqForm(kind, not told.get("sym", True), bool(told.get("desc_act")), plus=0 if form == "gptq_v2" else 1)]


def _awq(told: Told) -> list[Form]:
    choice(told, "version", ("gemm",))
    _bits(told, (4,))
    return [AwqForm(_group(told))]


def _mxfp4(told: Told) -> list[Form]:
    return [BlocksForm()]


def _modelopt(told: Told) -> list[Form]:
    inner = told.get("quantization")
    where = inner if isinstance(inner, dict) else told
    choice(where, "quant_algo", _MODELOPT)
    return [ScaledForm("_scale"), PairsForm(".weight", "_scale_2", divides=False)]


_MODELOPT = ("FP8", "NVFP4", "W4A16_NVFP4", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")

METHODS: dict[str, Callable[[Told], list[Form]]] = {
    "fp8": _fp8,
    "compressed-tensors": compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _bits(told: Told, served: tuple[int, ...]) -> int:
    bits = told.get("bits", told.get("w_bit"))
    if bits not in served:
        some = " or ".join(map(str, served))
        raise refused(f"quantised to {str(bits)[:20]} bits", f"served are {some} bits for this method")
    return int(bits)


def _group(told: Told) -> int:
    """Columns of a group; 0 for all."""
    name = "q_group_size" if "q_group_size" in told else "group_size"
    return max(whole_number(told, name, least=-1), 0)


def in_words(method: str, coding: Coding) -> str:
    """The code of most of a checkpoint's weights, as people call it."""
    name = coding.name if coding.name == method else f"{method} {coding.name}"
    match coding:
        case Scaled():
            return f"{name} ({_blocks(coding.block_rows, coding.block_cols)})"
        case Grouped() | Float4():
            return f"{name} (groups of {coding.group})"
    return name


def _blocks(rows: int, cols: int) -> str:
    if rows > 1:
        return f"{rows} x {cols} blocks" if cols else f"{rows} rows a scale"
    return f"groups of {cols}" if cols else "a scale for each row"
