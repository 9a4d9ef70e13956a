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

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_SMALLEST = 2.0**-20  # scale
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write_quantised(
    folder: Path,
    coder: Coder,
    told: Mapping[str, Any],
    family: str | Path = "llama-2",
    ending: str = "proj.weight",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a family's reduced checkpoint, or that of a folder, to `folder`: with each matrix of a name with this
    ending coded, and to `folder`/plain with the decoded weights.

    coder: makes the stored tensors of float32 [rows, cols]; the keys follow the matrix's name without ".weight".
    told: the entry about quantisation in config.json.
    """
    source = reduced_model(family) if isinstance(family, str) else family
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


# --- scales -----------------------------------------------------------------------------------------------------------


def blockwise(matrix: Tensor, height: int, width: int, largest: float) -> Tensor:
    """A scale for each block, float32 [ceil(rows / height), ceil(cols / width)]: `largest` times it is the block's
    largest weight."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix.abs(), (0, -cols % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, -1, width)
    return (blocks.amax(dim=(1, 3)) / largest).clamp(min=_SMALLEST)


def spread(scales: Tensor, rows: int, cols: int, height: int, width: int) -> Tensor:
    """A scale for each weight: [rows, cols], from one for each block."""
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


# --- numbers of 8 bits ------------------------------------------------------------------------------------------------


def fp8(height: int, width: int, scale: str = ".weight_scale", shape: tuple[int, ...] | None = None) -> Coder:
    """Blocks of height x width; 0 stands for all. shape: of the stored scales, if it is not [rows, cols]."""

    def code(matrix: Tensor) -> Coded:
        rows, cols = matrix.shape
        scales = blockwise(matrix, height or rows, width or cols, 448.0)
        each = spread(scales, rows, cols, height or rows, width or cols)
        codes = (matrix / each).to(torch.float8_e4m3fn)
        stored = scales if shape is None else scales.view(shape)
        return {".weight": codes, scale: stored}, codes.double() * each.double()

    return code


def fp8_blocks(height: int = 128, width: int = 128) -> Coder:
    """DeepSeek-V3's form: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md"""
    return fp8(height, width, ".weight_scale_inv")


def int8_rows(matrix: Tensor) -> Coded:
    scales = blockwise(matrix, 1, matrix.shape[1], 127.0).bfloat16()
    codes = (matrix / scales).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.double() * scales.double()


# --- integers in groups -----------------------------------------------------------------------------------------------


def packed(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """int32: numbers of `bits` along `dim`, the first one in the lowest bits."""
    moved = numbers.movedim(dim, -1).long()
    words = torch.zeros(*moved.shape[:-1], -(-moved.shape[-1] * bits // 32), dtype=torch.long)
    for place in range(32 // bits):
        each = moved[..., place :: 32 // bits]
        words[..., : each.shape[-1]] |= each << bits * place
    return words.where(words < 1 << 31, words - (1 << 32)).int().movedim(-1, dim)


def integers(matrix: Tensor, bits: int, group: int, order: Tensor, is_symmetric: bool) -> tuple[Tensor, ...]:
    """→ codes [rows, cols], scales float16 [rows, groups], zero points [rows, groups], decoded weights.

    order: int [cols], the group of each column.
    """
    rows, cols = matrix.shape
    most, groups = (1 << bits) - 1, cols // group
    least, largest = torch.empty(rows, groups), torch.empty(rows, groups)
    for number in range(groups):
        own = matrix[:, order == number]
        least[:, number], largest[:, number] = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
    if is_symmetric:
        scales = (torch.maximum(-least, largest) * 2 / most).clamp(min=_SMALLEST).half()
        zeros = torch.full((rows, groups), float(1 << bits - 1))
    else:
        scales = ((largest - least) / most).clamp(min=_SMALLEST).half()
        zeros = (-least / scales).round().clamp(0, most)
    codes = (matrix / scales[:, order].float() + zeros[:, order]).round().clamp(0, most)
    decoded = (codes - zeros[:, order]).double() * scales[:, order].double()
    return codes.long(), scales, zeros.long(), decoded


def column_groups(cols: int, group: int, is_sorted: bool) -> Tensor:
    """The group of each column: neighbours, or columns in a random order."""
    columns = torch.arange(cols) if not is_sorted else torch.randperm(cols, generator=torch.Generator().manual_seed(3))
    return columns // group


def gptq(bits: int = 4, group: int = 32, is_symmetric: bool = True, is_sorted: bool = False, plus: int = 1) -> Coder:
    """AutoGPTQ's form. plus: is subtracted from stored zero points; 0 in the form `gptq_v2`."""

    def code(matrix: Tensor) -> Coded:
        own = matrix.shape[1] if group < 0 else group
        order = column_groups(matrix.shape[1], own, is_sorted)
        codes, scales, zeros, decoded = integers(matrix, bits, own, order, is_symmetric)
        stored = {
            ".qweight": packed(codes.T, bits, 0),
            ".qzeros": packed((zeros.T - plus) % (1 << bits), bits, 1),
            ".scales": scales.T,
            ".g_idx": order.int(),
        }
        return stored, decoded

    return code


def awq(group: int = 32) -> Coder:
    """AutoAWQ's `gemm` form: a word's numbers are those of the outputs 0, 2, 4, 6, 1, 3, 5, 7."""

    def words(numbers: Tensor) -> Tensor:
        eights = numbers.view(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return packed(eights.reshape(len(numbers), -1), 4, 1)

    def code(matrix: Tensor) -> Coded:
        order = column_groups(matrix.shape[1], group, False)
        codes, scales, zeros, decoded = integers(matrix, 4, group, order, False)
        columns = {".qweight": words(codes.T.contiguous()), ".qzeros": words(zeros.T.contiguous())}
        return columns | {".scales": scales.T}, decoded

    return code


def pack_quantized(
    bits: int = 4, group: int = 32, is_symmetric: bool = True, is_sorted: bool = False, is_unpacked: bool = False
) -> Coder:
    """compressed-tensors' form. is_unpacked: zero points are stored as int8, as its first versions did."""

    def code(matrix: Tensor) -> Coded:
        rows, cols = matrix.shape
        own = cols if group < 0 else group
        order = column_groups(cols, own, is_sorted)
        codes, scales, zeros, decoded = integers(matrix, bits, own, order, is_symmetric)
        stored = {".weight_packed": packed(codes, bits, 1), ".weight_scale": scales.bfloat16()}
        stored[".weight_shape"] = torch.tensor([rows, cols])
        decoded = (codes - zeros[:, order]).double() * scales.bfloat16()[:, order].double()
        if not is_symmetric:
            signed = (zeros - (1 << bits - 1)).to(torch.int8)
            stored[".weight_zero_point"] = signed if is_unpacked else packed(zeros, bits, 0)
        if is_sorted:
            stored[".weight_g_idx"] = order.int()
        return stored, decoded

    return code


# --- floats of 4 bits -------------------------------------------------------------------------------------------------


def halves_of(matrix: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
    """→ uint8 [rows, cols / 2], the even columns in the low halves, and the weights. each: a scale for each weight."""
    codes = ((matrix / each).unsqueeze(-1) - _E2M1).abs().argmin(-1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), _E2M1[codes].double() * each.double()


def nvfp4(codes: str, whole: str, divides: bool) -> Coder:
    """An fp8 scale for 16 columns and one for the matrix. The keys are the ends of the names."""

    def code(matrix: Tensor) -> Coded:
        rows, cols = matrix.shape
        scale = (matrix.abs().max() / (6 * 448)).clamp(min=_SMALLEST)
        groups = (blockwise(matrix, 1, 16, 6.0) / scale).to(torch.float8_e4m3fn)
        each = spread(groups.float() * scale, rows, cols, 1, 16).clamp(min=1e-30)
        stored, decoded = halves_of(matrix, each)
        kept = (1 / scale).view(1) if divides else scale
        return {codes: stored, ".weight_scale": groups, whole: kept}, decoded

    return code


def mxfp4_pairs(matrix: Tensor) -> Coded:
    exponents = blockwise(matrix, 1, 32, 4.0).log2().ceil().clamp(-20, 20)
    codes, decoded = halves_of(matrix, spread(exponents.exp2(), *matrix.shape, 1, 32))
    return {".weight_packed": codes, ".weight_scale": (exponents + 127).to(torch.uint8)}, decoded


def mxfp4_experts(parameter: Tensor) -> Coded:
    """gpt-oss' form of [experts, cols, rows]."""
    each = [mxfp4_pairs(matrix.T) for matrix in parameter]
    blocks = torch.stack([stored[".weight_packed"] for stored, _ in each])
    scales = torch.stack([stored[".weight_scale"] for stored, _ in each])
    decoded = torch.stack([weights.T for _, weights in each])
    return {"_blocks": blocks.view(*scales.shape, 16), "_scales": scales}, decoded
