"""The entries of compressed-tensors in config.json, and its forms of stored matrices.

Each of `config_groups` says for some layers how their weights are coded. djinnd tells from the tensors which group a
layer belongs to: from the ends of their names, their dtypes and their shapes.
"""

from __future__ import annotations

from typing import Any

from djinnd.weights.quantised.coded import Form
from djinnd.weights.quantised.configuration import Told, choice, refused, sides, whole_number
from djinnd.weights.quantised.float4 import PairsForm
from djinnd.weights.quantised.grouped import Groups, PackedForm
from djinnd.weights.quantised.scaled import ScaledForm

_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_BITS = (4, 8)


def compressed_tensors(told: Told) -> list[Form]:
    """Raises ModelRejected for formats that are not served."""
    choice(told, "format", _FORMATS)
    for entry, what in (("sparsity_config", "sparse"), ("transform_config", "rotated")):
        more = told.get(entry)
        if isinstance(more, dict) and more and more.get("format") != "dense":
            raise refused(f"compressed-tensors with {entry}", f"{what} weights are not read; use one without")
    groups = told.get("config_groups")
    weights = [_weights(group) for group in groups.values()] if isinstance(groups, dict) else []
    blocks = [sides(each["block_structure"]) for each in weights if each.get("block_structure")]
    kinds = [_kind(each) for each in weights if each.get("type", "int") == "int"]
    return [
        ScaledForm("_scale", ("F8_E4M3", "I8"), blocks[0] if blocks else None),
        PackedForm(tuple(dict.fromkeys(kinds))),
        PairsForm(".weight_packed", "_global_scale", divides=True),
    ]


def _weights(group: Any) -> Told:
    """The entry about weights of one of the groups; {} if it has none."""
    told = group.get("weights") if isinstance(group, dict) else None
    if isinstance(group, dict) and group.get("format") is not None:
        choice(group, "format", _FORMATS)
    return told if isinstance(told, dict) else {}


def _kind(weights: Told) -> Groups:
    bits = weights.get("num_bits", 8)
    if bits not in _BITS:
        raise refused(f"quantised to {str(bits)[:20]} bits", "served are 4 and 8 bits")
    has_groups = weights.get("strategy") == "group" or (weights.get("group_size") or -1) != -1
    return Groups(int(bits), whole_number(weights, "group_size", least=1) if has_groups else 0)
