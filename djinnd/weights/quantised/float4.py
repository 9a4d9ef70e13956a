"""Matrices of 4-bit floats: MXFP4 with a power of two for 32 columns, NVFP4 with an fp8 scale for 16 columns.

    gpt-oss              X_blocks uint8 [experts, rows, groups, 16]   X_scales uint8 [experts, rows, groups]
    compressed-tensors   X.weight_packed uint8 [rows, cols / 2]       X.weight_scale, X.weight_global_scale (divides)
    ModelOpt             X.weight uint8 [rows, cols / 2]              X.weight_scale, X.weight_scale_2 (multiplies)

Sources: transformers.integrations.mxfp4; compressed-tensors' nvfp4 and mxfp4 compressors; ModelOpt's unified export.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.weights.checkpoint import TensorInfo
from djinnd.weights.forms.codings import Float4
from djinnd.weights.quantised.coded import CodedTensor, Source, Stored, companion, expect_fit, matrices, misfit


@dataclass(frozen=True, slots=True)
class BlocksForm:
    """Experts of gpt-oss. The model's parameter has the transposed matrices: [experts, cols, rows]."""

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        if codes.stored != "U8" or not name.endswith("_blocks"):
            return None
        if len(codes.shape) != 4 or not math.prod(codes.shape) or codes.shape[3] != 16:
            raise misfit(codes, f"has shape {list(codes.shape)}; blocks are [experts, rows, groups, 16]")
        parameter = name.removesuffix("_blocks")
        scales = companion(codes, parameter + "_scales", stored, ("U8",), codes.shape[:3])
        stack, rows, groups = scales.shape
        return CodedTensor(parameter, Float4(), rows, groups * 32, (Source(codes), Source(scales)), stack, True)


@dataclass(frozen=True, slots=True)
class PairsForm:
    """Two floats in a byte. codes: the end of the name; whole: that of the scale of the whole matrix. divides: the
    weights are divided by that scale."""

    codes: str
    whole: str
    divides: bool

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        weight = name.removesuffix(self.codes) + ".weight"
        if codes.stored != "U8" or not name.endswith(self.codes) or weight + "_scale" not in stored:
            return None
        if weight.removesuffix("weight") + "pre_quant_scale" in stored:
            raise misfit(codes, "has scales for the inputs of its layer (AWQ), which are not served")
        stack, rows, half = matrices(codes)
        is_nvidia = stored[weight + "_scale"].stored != "U8"
        coding = Float4(is_nvidia)
        expect_fit(codes, coding, rows, half * 2, coding.group)
        shape = (*codes.shape[:-1], half * 2 // coding.group)
        sources = [
            Source(codes),
            Source(companion(codes, weight + "_scale", stored, ("F8_E4M3",) if is_nvidia else ("U8",), shape)),
        ]
        if is_nvidia:
            sources.append(self._whole(codes, companion(codes, weight + self.whole, stored, ("F32",)), stack))
        return CodedTensor(weight, coding, rows, half * 2, tuple(sources), stack)

    def _whole(self, codes: TensorInfo, scale: TensorInfo, stack: int) -> Source:
        if math.prod(scale.shape) != max(stack, 1) or (stack and scale.shape[0] != stack):
            raise misfit(scale, f"has shape {list(scale.shape)}; each matrix of {codes.name[:200]} has one such scale")
        return Source(scale, _reciprocal if self.divides else _same)


def _reciprocal(stored: Tensor, part: Tensor) -> None:
    part.copy_(torch.reciprocal(stored).view(1, 1))


def _same(stored: Tensor, part: Tensor) -> None:
    part.copy_(stored.view(1, 1))
