"""Matrices in host memory by which the host's cores multiply: plain ones, and int8 codes with scales.

torch has two products by codes. One takes int8 codes as they lie, with one scale for each row. The other takes codes of
4 bits with scales for groups of columns, in an order of its own. A code of 8 bits is 16 times its high half plus its
low half, so a matrix with groups is multiplied as two matrices of 4 bits: a copy of a byte a weight.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.model.fast.linear import fast_linear
from djinnd.model.tuning import ORDERED_ROWS
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Grouped, Scaled

# Columns of int8 codes that torch's product reads at a time, at most. It does not check that they are there: with a
# part of them, it reads behind the matrix.
_COLUMNS = 32
_GROUPS = (256, 128, 64, 32)  # columns of a group that the product by 4 bits takes
_ROWS = 16  # rows must be a multiple for that product


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    weight: Tensor  # [rows, cols], in the dtype of computing

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, cols] on the host → [tokens, rows]."""
        return fast_linear(x, self.weight, None)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    codes: Tensor  # int8 [rows, cols]
    scales: Tensor  # [rows], in the dtype of computing

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, cols] on the host → [tokens, rows]."""
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        return product


@dataclass(frozen=True, slots=True)
class HalvesMatrix:
    """Codes of 8 bits as their high and their low halves, in the order of torch's product by 4 bits."""

    halves: tuple[Tensor, Tensor]  # uint8 [rows, cols / 2] each
    scales: tuple[Tensor, Tensor]  # [groups, rows, (scale, zero)] each: a half stands for (half - 8) * scale + zero
    group: int  # columns

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, cols] on the host → [tokens, rows]."""
        high, low = (self._product(x.contiguous(), *each) for each in zip(self.halves, self.scales, strict=True))
        return high.add_(low)

    def _product(self, x: Tensor, half: Tensor, scales: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, half, self.group, scales)
        return product


HostMatrix = PlainMatrix | Int8Matrix | HalvesMatrix


def int8_group(coding: Coding, rows: int, cols: int) -> int | None:
    """The columns with one scale in the product by the codes: all, or those of a group. None if the host does not
    multiply by the codes."""
    columns = _columns(coding, cols)
    if columns is None:
        return None
    if columns == cols:
        return None if cols % _COLUMNS else cols
    return None if rows % _ROWS else next((group for group in _GROUPS if math.gcd(columns, cols) % group == 0), None)


def _columns(coding: Coding, cols: int) -> int | None:
    """The columns of a row that share a scale, if the code is one of 8 bits; None for other codes."""
    if isinstance(coding, Scaled) and coding.codes is torch.int8:
        return min(coding.block_cols or cols, cols)
    if isinstance(coding, Grouped) and coding.bits == 8 and not (coding.has_zeros or coding.has_order):
        return coding.group
    return None


def is_multiplied_in_place(coding: Coding, rows: int, cols: int) -> bool:
    """True if torch multiplies by the codes as they lie, for a matrix for which `int8_group` is set."""
    return isinstance(coding, Scaled) and int8_group(coding, rows, cols) == cols


def int8_matrix(coding: Coding, parts: Sequence[Tensor], dtype: torch.dtype) -> Int8Matrix | HalvesMatrix:
    """parts: of one matrix, [1, *shape] each, for which `int8_group` is set. dtype: of computing."""
    (codes,), (scales,) = parts
    rows, cols = codes.shape
    group, columns = int8_group(coding, rows, cols), _columns(coding, cols)
    assert group is not None and columns is not None
    if isinstance(coding, Scaled):
        scales = scales.repeat_interleave(coding.block_rows or rows, 0)[:rows]
    if group < cols:
        return _halves(codes, scales.repeat_interleave(columns // group, 1)[:, : cols // group], group, dtype)
    if not isinstance(coding, Scaled):  # its codes are unsigned, and stand for numbers that are smaller by 128
        codes = private(codes.numel(), torch.int8).view(rows, cols).copy_((codes ^ 128).view(torch.int8))
    return Int8Matrix(codes, scales[:, 0].to(dtype).contiguous())


def _halves(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> HalvesMatrix:
    """scales: [rows, groups]."""
    rows, cols = codes.shape
    high, low = private(rows * cols, torch.uint8).view(2, rows, cols // 2)
    for first in range(0, rows, ORDERED_ROWS):
        own = slice(first, first + ORDERED_ROWS)
        some = codes[own] if codes.dtype is torch.uint8 else codes[own].view(torch.uint8) ^ 128
        for half, numbers in ((high, some >> 4), (low, some & 15)):
            half[own] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
    each = scales.T.to(dtype)
    of_high = torch.stack((16 * each, torch.zeros_like(each)), -1)
    return HalvesMatrix((high, low), (of_high, torch.stack((each, 8 * each), -1)), group)


def private(numel: int, dtype: torch.dtype) -> Tensor:
    """Private host memory, [numel]. Large pages let a core read it with fewer misses of its address tables."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
