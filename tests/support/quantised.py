"""Quantised checkpoints for tests, written as their formats' specifications say, beside plain ones with the decoded
weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import reduced_model

Coded = tuple[dict[str, Tensor], Tensor]  # stored tensors by the ends of their names; the decoded weights
Coder = Callable[[Tensor], Coded]

TINY_SCALE = 2.0**-20


def write_quantised(
    folder: Path,
    coder: Coder,
    told: Mapping[str, Any],
    family: str = "llama-2",
    ending: str = "proj.weight",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the family's reduced checkpoint to `folder`, with each matrix of a name with this ending coded, and with
    the decoded weights to `folder`/plain.

    coder: makes what is stored of float32 [rows, cols]; the keys follow the matrix's name without ".weight".
    told: the entry about quantisation in config.json.
    """
    source = reduced_model(family)
    coded, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(ending) or tensor.dim() < 2:
            coded[name] = plain[name] = tensor
            continue
        stored, decoded = coder(tensor.float())
        coded |= {name.removesuffix(".weight") + end: each.contiguous() for end, each in stored.items()}
        plain[name] = decoded.to(tensor.dtype).contiguous()
    assert len(coded) > len(plain), "no tensor of the checkpoint has this ending"
    original = json.loads((source / "config.json").read_text()) | dict(config or {})
    for where, tensors, more in ((folder, coded, {"quantization_config": dict(told)}), (folder / "plain", plain, {})):
        where.mkdir(parents=True, exist_ok=True)
        save_file(tensors, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(original | more))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (source / file).exists():
                (where / file).write_bytes((source / file).read_bytes())
    return folder


def spread(scales: Tensor, rows: int, cols: int, height: int, width: int) -> Tensor:
    """A scale for each weight: [rows, cols], from one for each block."""
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


def blockwise(matrix: Tensor, height: int, width: int, largest: float) -> Tensor:
    """A scale for each block, float32 [ceil(rows / height), ceil(cols / width)]: the block's `largest` number is its
    largest weight."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix.abs(), (0, -cols % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, -1, width)
    return (blocks.amax(dim=(1, 3)) / largest).clamp(min=TINY_SCALE)


def fp8_blocks(height: int = 128, width: int = 128, scale: str = ".weight_scale_inv") -> Coder:
    """DeepSeek-V3's form: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md"""

    def code(matrix: Tensor) -> Coded:
        scales = blockwise(matrix, height, width, 448.0)
        each = spread(scales, *matrix.shape, height, width)
        codes = (matrix / each).to(torch.float8_e4m3fn)
        return {".weight": codes, scale: scales}, codes.double() * each.double()

    return code


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
