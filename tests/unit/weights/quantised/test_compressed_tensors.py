"""Forms of compressed-tensors, written and decoded by that library where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.open_files import checkpoint_of

pytest.importorskip("compressed_tensors")

NAME = "model.layers.0.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 in groups": ("pack-quantized", INT4 | {"symmetric": True}),
    "int4 in groups with zero points": ("pack-quantized", INT4 | {"symmetric": False}),
    "int8 in rows": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "fp8 in rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "fp8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48], "symmetric": True},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        | {"scale_dtype": "torch.float8_e4m3fn"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        | {"scale_dtype": "torch.uint8"},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        | {"scale_dtype": "torch.uint8"},
    ),
}


def extremes(matrix: Tensor, weights: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of each scale, of the scales' shape."""
    rows, cols = matrix.shape
    height, width = {
        "tensor": (rows, cols),
        "channel": (1, cols),
        "block": tuple(weights.get("block_structure", ())),
    }.get(weights["strategy"], (1, weights.get("group_size")))
    blocks = matrix.view(rows // height, height, cols // width, width)
    least, largest = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    return (least.view(1), largest.view(1)) if weights["strategy"] == "tensor" else (least, largest)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_library_decodes(tmp_path: Path, case: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    form, weights = CASES[case]
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    torch.manual_seed(0)
    matrix = torch.randn(64, 96)
    least, largest = extremes(matrix, weights)
    state = {"weight": matrix}
    if weights["strategy"] == "tensor_group":
        state["weight_global_scale"] = generate_gparam(matrix.amin(), matrix.amax())
    scale, zeros = calculate_qparams(least, largest, arguments, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    decoded = compressor.decompress(stored, scheme)["weight"]
    assert (decoded - matrix).abs().mean() < 0.1

    told = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "quantization_config": told}))
    save_file({f"{NAME}.{end}": each.contiguous() for end, each in stored.items()}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_of(tmp_path)
    digits = 2**-7 if decoded.dtype is torch.bfloat16 else 1e-5  # the library decodes some forms in bfloat16
    torch.testing.assert_close(checkpoint.read(f"{NAME}.weight"), decoded.float(), rtol=digits, atol=1e-6)
    assert list(checkpoint.tensors) == [f"{NAME}.weight"]
