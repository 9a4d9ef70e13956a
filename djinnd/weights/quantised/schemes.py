"""The quantisation methods that djinnd reads: their entries in config.json, and their forms of stored matrices.

The stored tensors decide: lists of modules that stay plain are not looked at. The quantisation of activations is not
applied: djinnd computes with the decoded weights in the checkpoint's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn_client.errors import ModelRejected
from djinnd.weights.checkpoint import CONFIG
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Scaled
from djinnd.weights.quantised.coded import Form
from djinnd.weights.quantised.configuration import Told
from djinnd.weights.quantised.scaled import ScaledForm

_LARGEST = 1 << 20  # weights along a side of a block


def forms_of(told: Told) -> tuple[str, list[Form]]:
    """The method's name, and its forms. Raises ModelRejected for a method that is not served, with those that are."""
    method = str(told.get("quant_method"))[:80]
    read = METHODS.get(method)
    if read is None:
        raise refused(f"quantised by {method}", f"served are {', '.join(METHODS)}, GGUF files, and plain weights")
    return method, read(told)


def refused(what: str, remedy: str) -> ModelRejected:
    return ModelRejected(f"the checkpoint is {what}, which is not served: {remedy}", file=CONFIG)


def _fp8(told: Told) -> list[Form]:
    block = told.get("weight_block_size")
    return [ScaledForm("_scale_inv", block=None if block is None else _sides(block))]


METHODS: dict[str, Callable[[Told], list[Form]]] = {"fp8": _fp8}


def _sides(block: Any) -> tuple[int, int]:
    """The sides of a block. Raises ModelRejected."""
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(type(side) is int and 0 < side <= _LARGEST for side in block):
        raise ModelRejected(
            f"{CONFIG}: the block size of the weights is {str(block)[:80]}, not two lengths", file=CONFIG
        )
    return block[0], block[1]


def in_words(method: str, coding: Coding) -> str:
    """The code of most of a checkpoint's weights, as people call it."""
    name = coding.name if coding.name == method else f"{method} {coding.name}"
    if isinstance(coding, Scaled):
        return f"{name} ({_blocks(coding.block_rows, coding.block_cols)})"
    return name


def _blocks(rows: int, cols: int) -> str:
    if rows > 1:
        return f"{rows} x {cols} blocks" if cols else f"{rows} rows a scale"
    return f"groups of {cols}" if cols else "a scale for each row" if rows else "one scale for each matrix"
