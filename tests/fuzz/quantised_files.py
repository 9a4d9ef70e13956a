"""Quantised checkpoints: any entry of config.json and any tensors are read, or refused with a typed error."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from djinn_client.errors import DjinnError
from djinn_client.files.model_files import ModelFiles
from djinnd.weights.checkpoint import CONFIG, SINGLE, CheckpointFiles
from djinnd.weights.opening import open_checkpoint
from djinnd.weights.quantised.schemes import METHODS
from djinnd.weights.safetensors_header import BITS
from tests.fuzz.checkpoints import with_header
from tests.fuzz.messages import Choices
from tests.fuzz.target import Target

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
_GROUP = {"format": None, "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}}
_TOLD: dict[str, Any] = {
    "bits": 4,
    "group_size": 16,
    "sym": False,
    "desc_act": True,
    "weight_block_size": [16, 16],
    "config_groups": {"a": _GROUP},
}
_ODD: tuple[Any, ...] = (None, 0, -1, 8, 1 << 62, 1.5, "x", "9x9", True, [], [1, 2], {}, {"weights": {"num_bits": 8}})
_Tensors = dict[str, tuple[str, list[int]]]  # end of the name → dtype, shape
_WHOLE: dict[str, list[_Tensors]] = {  # of each method, tensors that fit each other
    "fp8": [{".weight": ("F8_E4M3", [32, 24]), ".weight_scale_inv": ("F32", [2, 2])}],
    "compressed-tensors": [
        {".weight": ("I8", [8, 32]), ".weight_scale": ("BF16", [8, 1])},
        {".weight_packed": ("I32", [8, 4]), ".weight_scale": ("F16", [8, 2]), ".weight_zero_point": ("I32", [1, 2])}
        | {".weight_g_idx": ("I32", [32])},
        {".weight_packed": ("U8", [4, 16]), ".weight_scale": ("F8_E4M3", [4, 2]), ".weight_global_scale": ("F32", [1])},
    ],
    "modelopt": [{".weight": ("U8", [3, 8]), ".weight_scale": ("F8_E4M3", [3, 1]), ".weight_scale_2": ("F32", [])}],
    "gptq": [
        {".qweight": ("I32", [4, 8]), ".qzeros": ("I32", [2, 1]), ".scales": ("F16", [2, 8]), ".g_idx": ("I32", [32])}
    ],
    "awq": [{".qweight": ("I32", [32, 2]), ".qzeros": ("I32", [2, 2]), ".scales": ("F16", [2, 16])}],
    "mxfp4": [{"_blocks": ("U8", [2, 3, 2, 16]), "_scales": ("U8", [2, 3, 2])}],
}
_STORED = ("U8", "I8", "I32", "F8_E4M3", "F8_E8M0", "F32", "BF16", "F4")
_SHAPES = ([16, 16], [2, 16, 8], [8], [], [1], [0, 4], [1, 1], [32, 2], [3, 1, 2, 1])


def seeds() -> Iterator[bytes]:
    yield bytes(64)
    yield bytes(range(128))


def made(choices: Choices) -> tuple[dict[str, Any], bytes]:
    """The entry of config.json, and the file of weights, with a few odd values and tensors."""
    method = list(METHODS)[choices.below(len(METHODS))]
    told = dict(_TOLD) | {"quant_method": method}
    for _ in range(choices.below(3)):
        told[list(told)[choices.below(len(told))]] = _ODD[choices.below(len(_ODD))]
    tensors = dict(_WHOLE[method][choices.below(len(_WHOLE[method]))])
    for _ in range(choices.below(3)):
        name = list(tensors)[choices.below(len(tensors))]
        stored, shape = tensors.pop(name)
        if choices.below(2):
            stored = _STORED[choices.below(len(_STORED))]
        if choices.below(2):
            shape = _SHAPES[choices.below(len(_SHAPES))]
        tensors[(name, ".weight", ".weight_scale")[max(choices.below(8) - 5, 0)]] = stored, shape
    entries, end = {}, 0
    for name, (stored, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[stored] // 8
        entries[f"w{name}"] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    return told, with_header(entries, bytes(choices.below(256) for _ in range(min(end, 64))).ljust(end, b"\1"))


def check(data: bytes) -> None:
    told, weights = made(Choices(data))
    (FOLDER / CONFIG).write_text(json.dumps({"dtype": "float32", "quantization_config": told}))
    (FOLDER / SINGLE).write_bytes(weights)
    with suppress(DjinnError), ModelFiles.open(str(FOLDER)) as files:
        checkpoint = open_checkpoint(files)
        for name in checkpoint.tensors:
            with suppress(DjinnError):
                checkpoint.check_readable(name)
                _read(checkpoint, name)


def _read(checkpoint: CheckpointFiles, name: str) -> None:
    """Decoded, and as parts. The parts take no more memory than some bytes for each weight."""
    whole = checkpoint.read(name)
    coding = checkpoint.coding(name)
    if coding is None:
        return
    stack = whole.view(-1, *whole.shape[-2:])
    stack = stack.transpose(1, 2) if checkpoint.is_transposed(name) else stack
    described = coding.parts(*stack.shape[1:])
    parts = [torch.empty((len(stack), *part.shape), dtype=part.dtype) for part in described]
    assert sum(part.nbytes for part in parts) <= 8 * whole.numel() + 4 * len(parts) * len(stack)
    checkpoint.read_parts(name, parts)


_PARSERS = ("checkpoint", "schemes", "scaled", "grouped", "float4", "configuration", "compressed_tensors")
TARGET = Target(tuple(f"djinnd.weights.quantised.{parser}" for parser in _PARSERS), seeds, check)
