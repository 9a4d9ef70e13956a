"""Matrices in host memory by which the host's cores multiply: plain ones, and int8 codes with scales.

torch multiplies by int8 codes as they lie, with one scale for each row. Where each group of columns has scales of its
own, every group is such a matrix, and their products are added up. The codes of a group have to lie in one piece, so
they are copied: a byte a weight.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.model.fast.linear import fast_linear
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Grouped, Scaled

# Columns of codes that torch's product reads at a time, at most. It does not check that they are there: with a part of
# them, it reads behind the matrix.
_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    weight: Tensor  # [rows, cols], in the dtype of computing

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, cols] on the host → [tokens, rows]."""
        return fast_linear(x, self.weight, None)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix in groups of columns. Sums of a group are rounded to the dtype of computing."""

    codes: Sequence[Tensor]  # of each group: int8 [rows, columns]
    scales: Tensor  # [groups, rows], in the dtype of computing

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, cols] on the host → [tokens, rows]."""
        if len(self.codes) == 1:
            return _product(x, self.codes[0], self.scales[0])
        columns = x.split([codes.shape[1] for codes in self.codes], dim=1)
        sums = [_product(*each) for each in zip(columns, self.codes, self.scales, strict=True)]
        return torch.stack(sums).sum(0)  # in float32, and rounded once


HostMatrix = PlainMatrix | Int8Matrix


def _product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    product: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), codes, scales)
    return product


def int8_columns(coding: Coding, cols: int) -> int | None:
    """The columns of a group, if the code is one of int8 numbers by which the host multiplies; else None."""
    if isinstance(coding, Scaled) and coding.codes is torch.int8:
        columns = min(coding.block_cols or cols, cols)
    elif isinstance(coding, Grouped) and coding.bits == 8 and not (coding.has_zeros or coding.has_order):
        columns = coding.group
    else:
        return None
    return None if columns % _COLUMNS or cols % _COLUMNS else columns


def is_one_group(coding: Coding, cols: int) -> bool:
    """True if torch multiplies by the codes as they lie, for a matrix for which `int8_columns` is set."""
    return isinstance(coding, Scaled) and int8_columns(coding, cols) == cols


def int8_matrix(coding: Coding, parts: Sequence[Tensor], cols: int, dtype: torch.dtype) -> Int8Matrix:
    """parts: of one matrix, [1, *shape] each, for which `int8_columns` is set. dtype: of computing."""
    (codes,), (scales,) = parts
    columns = int8_columns(coding, cols)
    assert columns is not None and codes.shape[1] == cols
    if isinstance(coding, Scaled):
        scales = scales.repeat_interleave(coding.block_rows or len(codes), 0)[: len(codes)]
    own = [codes] if is_one_group(coding, cols) else _in_groups(codes, columns)
    return Int8Matrix(own, scales.T.to(dtype).contiguous())


def _in_groups(codes: Tensor, columns: int) -> Sequence[Tensor]:
    """Copies of each group's codes. Unsigned codes stand for numbers that are smaller by 128."""
    groups = codes.split(columns, dim=1)
    places = private(codes.numel(), torch.int8).split([group.numel() for group in groups])
    copies = [place.view(group.shape) for place, group in zip(places, groups, strict=True)]
    for copy, group in zip(copies, groups, strict=True):
        copy.copy_(group if codes.dtype is torch.int8 else (group ^ 128).view(torch.int8))
    return copies


def private(numel: int, dtype: torch.dtype) -> Tensor:
    """Private host memory, [numel]. Large pages let a core read it with fewer misses of its address tables."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
