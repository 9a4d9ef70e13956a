"""CodedTensor: a tensor that several stored tensors make up, and how each part of its coding is made from them.

stored                                    parts of the coding
X.weight            F8_E4M3 ── bytes ───► codes
X.weight_scale_inv  BF16 ──── turned ───► scales, float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinnd.weights.checkpoint import TensorInfo
from djinnd.weights.forms.coding import Coding

Stored = Mapping[str, TensorInfo]
Turn = Callable[[Tensor, Tensor], None]  # (what is stored for one matrix, the part to fill); may raise ModelRejected

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Source:
    """The stored tensor of a part. Without `turn`, its bytes are the part's."""

    info: TensorInfo
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor [rows, cols], or [stack, rows, cols] if it is a stack; [stack, cols, rows] if it is transposed.

    sources: in the order of the coding's parts
    """

    name: str
    coding: Coding
    rows: int
    cols: int
    sources: tuple[Source, ...]
    stack: int = 0  # 0: a single matrix
    is_transposed: bool = False

    def __post_init__(self) -> None:
        for source, part in zip(self.sources, self.coding.parts(self.rows, self.cols), strict=True):
            assert source.turn is not None or source.info.nbytes == part.nbytes * max(self.stack, 1), source.info

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = (self.cols, self.rows) if self.is_transposed else (self.rows, self.cols)
        return (self.stack, *matrix) if self.stack else matrix

    @property
    def nbytes(self) -> int:
        return max(self.stack, 1) * self.coding.nbytes(self.rows, self.cols)


class Form(Protocol):
    """A way in which a method stores matrices."""

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        """The coded tensor that the stored tensor `name` has the codes of; None if `name` is no tensor of codes.

        Raises ModelRejected if its companions are missing or have other shapes.
        """


def misfit(info: TensorInfo, told: str) -> ModelRejected:
    return ModelRejected(f"{info.file}: tensor {info.name[:200]} {told}", file=info.file, tensor=info.name)


def expect_fit(codes: TensorInfo, coding: Coding, rows: int, cols: int, group: int) -> None:
    """Raises ModelRejected unless the coding can hold the matrices."""
    if not coding.fits(rows, cols):
        raise misfit(codes, f"has rows of {cols:,} weights, which {coding.name} in groups of {group:,} does not fit")


def matrices(info: TensorInfo) -> tuple[int, int, int]:
    """Stack (0 for a single matrix), rows and columns of a stored tensor. Raises ModelRejected if it is no matrix."""
    if len(info.shape) not in (2, 3) or not math.prod(info.shape):
        raise misfit(info, f"has shape {list(info.shape)}, and codes are matrices or a stack of them")
    *stack, rows, cols = info.shape
    return (stack[0] if stack else 0), rows, cols


def companion(
    codes: TensorInfo, name: str, stored: Stored, dtypes: Collection[str], shape: tuple[int, ...] | None = None
) -> TensorInfo:
    """The stored tensor that belongs to `codes`. Raises ModelRejected if it is missing or is another one."""
    info = stored.get(name)
    if info is None:
        raise misfit(codes, f"has codes, but the checkpoint lacks {name[:200]}")
    if info.stored not in dtypes:
        raise misfit(info, f"is {info.stored}; such tensors are {' or '.join(dtypes)}")
    if shape is not None and info.shape != shape:
        raise misfit(info, f"has shape {list(info.shape)}, but the codes of {list(codes.shape)} need {list(shape)}")
    return info


def turned(stored: Tensor, part: Tensor) -> None:
    """Fills a part from a stored tensor that is its transpose."""
    part.copy_(stored.T)
