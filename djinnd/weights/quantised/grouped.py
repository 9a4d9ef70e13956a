"""Matrices of integers of 4 and 8 bits in groups of columns, each group with a scale and a zero point.

    method               codes                              scales                       zero points, order of columns
    compressed-tensors   weight_packed int32 [rows, words]  weight_scale [rows, groups]  weight_zero_point, weight_g_idx
    GPTQ                 qweight int32 [words, rows]        scales [groups, rows]        qzeros, g_idx
    AWQ                  qweight int32 [cols, words]        scales [groups, rows]        qzeros

Rows are the outputs of the layer. A word has 8 or 4 numbers, the first in the lowest bits; AWQ has an order of its own.

Sources: pack_quantized of compressed-tensors; AutoGPTQ's qlinear_cuda_old.py, and GPTQModel for `gptq_v2`; AutoAWQ's
utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.weights.checkpoint import TensorInfo
from djinnd.weights.forms.codings import Grouped
from djinnd.weights.quantised.coded import (
    DTYPES,
    FLOATS,
    CodedTensor,
    Source,
    Stored,
    companion,
    expect_fit,
    matrices,
    misfit,
    turned,
)
from djinnd.weights.quantised.words import awq_numbers, awq_turn, gptq_turn, numbers


class Groups(NamedTuple):
    """bits of a number; `group`: columns that share a scale, 0 for all."""

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class PackedForm:
    """compressed-tensors' pack-quantized. kinds: all in config.json; the shapes of a matrix pick one of them."""

    kinds: Sequence[Groups]

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        if codes.stored != "I32" or not name.endswith(".weight_packed"):
            return None
        weight = name.removesuffix("_packed")
        stack, rows, words = matrices(codes)
        if stack:
            raise misfit(codes, f"has shape {list(codes.shape)}; packed integers are matrices")
        scales = companion(codes, weight + "_scale", stored, FLOATS)
        bits, cols, groups = self._kind(codes, scales, rows, words)
        has_zeros, has_order = weight + "_zero_point" in stored, weight + "_g_idx" in stored and groups > 1
        coding = Grouped(bits, cols // groups, DTYPES[scales.stored], has_zeros, has_order)
        expect_fit(codes, coding, rows, cols, cols // groups)
        sources = [Source(codes), Source(scales, _spread)]
        if has_zeros:
            zeros = companion(codes, weight + "_zero_point", stored, ("I32", "I8"))
            packed = -(-rows * bits // 32)
            companion(codes, zeros.name, stored, DTYPES, (packed if zeros.stored == "I32" else rows, groups))
            sources.append(Source(zeros, partial(_zeros_of_rows, bits)))
        if has_order:
            sources.append(_order(codes, weight + "_g_idx", stored, cols, groups))
        return CodedTensor(weight, coding, rows, cols, tuple(sources))

    def _kind(self, codes: TensorInfo, scales: TensorInfo, rows: int, words: int) -> tuple[int, int, int]:
        """Bits, columns and groups. Raises ModelRejected unless one of the kinds fits the shapes."""
        fitting = set()
        for bits, group in self.kinds:
            cols = words * 32 // bits
            groups = cols // group if group else 1
            if scales.shape == (rows, groups) or (not group and scales.shape in ((), (1,), (rows,))):
                fitting.add((bits, cols, groups))
        if len(fitting) == 1:
            return fitting.pop()
        kinds = " or ".join(f"{bits} bits in groups of {group or 'all columns'}" for bits, group in self.kinds)
        what = "fits several of" if fitting else "does not fit"
        raise misfit(scales, f"has shape {list(scales.shape)}, which {what} {kinds or 'no integers'} in config.json")


@dataclass(frozen=True, slots=True)
class GptqForm:
    """has_zeros: False if the codes are symmetric. plus: added to stored zero points; 1 but for `gptq_v2`."""

    kind: Groups
    has_zeros: bool
    has_order: bool
    plus: int = 1

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        if codes.stored != "I32" or not name.endswith(".qweight"):
            return None
        module, bits = name.removesuffix("qweight"), self.kind.bits
        _, words, rows = matrices(codes)
        cols = words * 32 // bits
        coding, sources = _by_columns(codes, module, stored, self.kind, (rows, cols), self.has_order)
        groups = cols // coding.group
        if self.has_zeros:
            zeros = companion(codes, module + "qzeros", stored, ("I32",), (groups, -(-rows * bits // 32)))
            coding = Grouped(bits, coding.group, coding.scales, True, coding.has_order)
            sources.insert(1, Source(zeros, partial(_zeros_of_words, bits, self.plus)))
        return CodedTensor(module + "weight", coding, rows, cols, (Source(codes, gptq_turn), *sources))


@dataclass(frozen=True, slots=True)
class AwqForm:
    """AWQ's `gemm` version, with 4 bits."""

    group: int

    def find(self, name: str, stored: Stored) -> CodedTensor | None:
        codes = stored[name]
        if codes.stored != "I32" or not name.endswith(".qweight"):
            return None
        module = name.removesuffix("qweight")
        _, cols, words = matrices(codes)
        rows = words * 8
        coding, sources = _by_columns(codes, module, stored, Groups(4, self.group), (rows, cols), False)
        zeros = companion(codes, module + "qzeros", stored, ("I32",), (cols // coding.group, words))
        coding = Grouped(4, coding.group, coding.scales, has_zeros=True)
        sources.append(Source(zeros, _zeros_of_awq))
        return CodedTensor(module + "weight", coding, rows, cols, (Source(codes, awq_turn), *sources))


def _by_columns(
    codes: TensorInfo, module: str, stored: Stored, kind: Groups, shape: tuple[int, int], has_order: bool
) -> tuple[Grouped, list[Source]]:
    """The coding without zero points, and its sources behind the codes, where columns come first: GPTQ's and AWQ's."""
    rows, cols = shape
    if len(codes.shape) != 2:
        raise misfit(codes, f"has shape {list(codes.shape)}; packed integers are matrices")
    scales = companion(codes, module + "scales", stored, FLOATS)
    group = kind.group or cols
    coding = Grouped(kind.bits, group, DTYPES[scales.stored], has_order=has_order and group < cols)
    expect_fit(codes, coding, rows, cols, group)
    companion(codes, scales.name, stored, FLOATS, (cols // group, rows))
    sources = [Source(scales, turned)]
    if coding.has_order:
        sources.append(_order(codes, module + "g_idx", stored, cols, cols // group))
    return coding, sources


def _order(codes: TensorInfo, name: str, stored: Stored, cols: int, groups: int) -> Source:
    info = companion(codes, name, stored, ("I32",), (cols,))
    return Source(info, partial(_checked_order, info, groups))


def _checked_order(info: TensorInfo, groups: int, stored: Tensor, part: Tensor) -> None:
    """The group of each column. All are -1 if the columns are not sorted. Raises ModelRejected for others that do not
    exist, because kernels look groups up by these numbers."""
    if bool((stored == -1).all()):
        stored = torch.arange(len(stored)) // (len(stored) // groups)
    if bool(((stored < 0) | (stored >= groups)).any()):
        raise misfit(info, f"names groups of columns that do not exist: there are {groups:,}")
    part.copy_(stored.view(part.shape))


def _spread(stored: Tensor, part: Tensor) -> None:
    part.copy_(stored.view(-1, part.shape[1]))


def _zeros_of_rows(bits: int, stored: Tensor, part: Tensor) -> None:
    """compressed-tensors': packed along the rows, or one signed number each."""
    if stored.dtype is torch.int8:
        part.copy_(stored.view(torch.uint8) + (1 << bits - 1))
        return
    words, groups = stored.shape
    each = numbers(stored.view(-1, 1), bits).view(words, groups, -1)
    part.copy_(each.transpose(1, 2).reshape(-1, groups)[: len(part)])


def _zeros_of_words(bits: int, plus: int, stored: Tensor, part: Tensor) -> None:
    """GPTQ's: packed along the rows' words. A zero point of 0 is stored as the largest number."""
    part.copy_((numbers(stored, bits)[:, : len(part)] + plus & (1 << bits) - 1).T)


def _zeros_of_awq(stored: Tensor, part: Tensor) -> None:
    part.copy_(awq_numbers(stored).T)
