"""ScaledForm: matrices of fp8 or int8 beside a tensor of scales. The method names the scales, and their shape says how
many weights share one. One scale for a whole matrix is read as equal scales of its rows: so matrices of
experts can be joined in their code, each with its own scale.

    fp8 (DeepSeek-V3, Qwen3-FP8)    X.weight, X.weight_scale_inv    [rows / 128, cols / 128], or one
    compressed-tensors, ModelOpt    X.weight, X.weight_scale        one, [rows, 1], [rows, groups], or blocks

Sources: transformers.integrations.finegrained_fp8; compressed-tensors' float_quantized and int_quantized; ModelOpt's
unified export to Hugging Face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.weights.checkpoint import TensorInfo
from djinnd.weights.forms.codings import Scaled
from djinnd.weights.quantised.coded import DTYPES, FLOATS, CodedTensor, Source, Stored, companion, matrices, misfit

_SCALES = (*FLOATS, "F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class ScaledForm:
    """suffix: of the scales' name, behind that of the codes. block: rows and columns of a block, if blocks may be
    incomplete at the edges. codes: the dtypes of codes in safetensors."""

    suffix: str
    codes: tuple[str, ...] = ("F8_E4M3",)
    block: tuple[int, int] | None = None

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        if codes.stored not in self.codes or name + self.suffix not in stored:
            return None
        stack, rows, cols = matrices(codes)
        if codes.stored == "I8" and name + "_zero_point" in stored:
            raise misfit(codes, "has zero points, which are not served for int8: use a symmetric checkpoint")
        scales = companion(codes, name + self.suffix, stored, _SCALES)
        grid = _grid(scales, stack, rows)
        if self.block is not None and grid == (-(-rows // self.block[0]), -(-cols // self.block[1])):
            coding = Scaled(DTYPES[codes.stored], *self.block)
        elif grid is not None and rows % grid[0] == 0 and cols % grid[1] == 0:
            height, width = rows // grid[0], cols // grid[1]
            coding = Scaled(DTYPES[codes.stored], 1 if grid == (1, 1) else height, width if grid[1] > 1 else 0)
        else:
            raise misfit(scales, f"has shape {list(scales.shape)}, which are no scales of {list(codes.shape)} codes")
        return CodedTensor(name, coding, rows, cols, (Source(codes), Source(scales, _turn)), stack)


def _grid(scales: TensorInfo, stack: int, rows: int) -> tuple[int, int] | None:
    """Rows and columns of each matrix's scales; None if the tensor has no such scales."""
    if stack and scales.shape[:1] != (stack,):
        return None
    shape = list(scales.shape[1:] if stack else scales.shape)
    numbers = math.prod(shape)
    if numbers == 1:
        return 1, 1
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # ModelOpt's blocks
        shape = [shape[0], shape[2]]
    if shape == [rows]:
        return rows, 1
    return (shape[0], shape[1]) if len(shape) == 2 and numbers else None


def _turn(stored: Tensor, part: Tensor) -> None:
    numbers = torch.exp2(stored.float() - 127) if stored.dtype is torch.uint8 else stored
    part.copy_(numbers.view(1, 1) if numbers.numel() == 1 else numbers.view(part.shape))
