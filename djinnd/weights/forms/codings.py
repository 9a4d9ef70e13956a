"""The codings that djinnd keeps: scaled numbers of 8 bits, integers of 4 and 8 bits in groups, and floats of 4 bits.

Sources: FP8 with blocks of 128 x 128 is DeepSeek-V3's (arXiv 2412.19437 §3.3); groups of integers are those of GPTQ
(arXiv 2210.17323) and AWQ (arXiv 2306.00978); MXFP4 is of the OCP Microscaling specification 1.0; NVFP4 is NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from djinnd.weights.forms.coding import Coding, Part

CODES_8 = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


@dataclass(frozen=True, slots=True)
class Scaled(Coding):
    """Numbers of 8 bits, fp8 (e4m3) or int8, with a float32 scale for each block of weights: code * scale.

    A block has `block_rows` x `block_cols` weights; 0 stands for all rows or all columns. Blocks at the edges may be
    incomplete.
    """

    codes: torch.dtype
    block_rows: int = 0
    block_cols: int = 0

    @property
    def name(self) -> str:
        return CODES_8[self.codes]

    def fits(self, rows: int, cols: int) -> bool:
        return True

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        step, width = self.block_rows or rows, self.block_cols or cols
        scales = Part("scales", torch.float32, (-(-rows // step), -(-cols // width)), step)
        return Part("codes", self.codes, (rows, cols)), scales

    def decoded(self, parts: Sequence[Tensor], cols: int) -> Tensor:
        codes, scales = parts
        width = self.block_cols or cols
        each = scales.repeat_interleave(width, 1)[:, :cols] if scales.shape[1] > 1 else scales
        if len(scales) > 1:
            each = each.repeat_interleave(self.block_rows, 0)[: len(codes)]
        return codes.float() * each


@dataclass(frozen=True, slots=True)
class Grouped(Coding):
    """Unsigned integers of 4 or 8 bits with a scale and a zero point for each group of columns: (code - zero) * scale.

    codes    uint8 [rows, cols * bits / 8]; with 4 bits, column 2i is in the low half of byte i, 2i + 1 in the high half
    scales   [rows, groups], dtype `scales`
    zeros    uint8 [rows, groups]; absent for symmetric codes, where the zero point is half of the range
    order    int32 [1, cols], the group of each column, if columns were sorted before they were grouped; else absent,
             and a group is `group` neighbouring columns
    """

    bits: int
    group: int  # columns
    scales: torch.dtype = torch.float16
    has_zeros: bool = False
    has_order: bool = False

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def fits(self, rows: int, cols: int) -> bool:
        return cols % self.group == 0 and cols * self.bits % 8 == 0

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        groups = cols // self.group
        found = [
            Part("codes", torch.uint8, (rows, cols * self.bits // 8)),
            Part("scales", self.scales, (rows, groups)),
        ]
        if self.has_zeros:
            found.append(Part("zeros", torch.uint8, (rows, groups)))
        if self.has_order:
            found.append(Part("order", torch.int32, (1, cols), rows))
        return tuple(found)

    def decoded(self, parts: Sequence[Tensor], cols: int) -> Tensor:
        codes, scales, *others = parts
        numbers = codes.float() if self.bits == 8 else halves(codes).float()
        zeros: Tensor | float = others.pop(0).float() if self.has_zeros else float(1 << self.bits - 1)
        if self.has_order:
            order = others.pop()[0].long()
            spread = [each[:, order] if isinstance(each, Tensor) else each for each in (scales.float(), zeros)]
            return (numbers - spread[1]) * spread[0]
        groups = numbers.view(len(codes), -1, self.group)
        zeros = zeros.unsqueeze(-1) if isinstance(zeros, Tensor) else zeros
        return ((groups - zeros) * scales.float().unsqueeze(-1)).view(len(codes), cols)


@dataclass(frozen=True, slots=True)
class Float4(Coding):
    """Floats of 4 bits (e2m1) with a scale for each group of columns.

    codes    uint8 [rows, cols / 2]; column 2i is in the low half of byte i, column 2i + 1 in the high half
    scales   MXFP4: uint8 [rows, cols / 32], the exponent of a power of two plus 127
             NVFP4: float8_e4m3fn [rows, cols / 16]
    scale    NVFP4: float32 [1, 1], which multiplies all weights
    """

    is_nvidia: bool = False

    @property
    def name(self) -> str:
        return "nvfp4" if self.is_nvidia else "mxfp4"

    @property
    def group(self) -> int:
        return 16 if self.is_nvidia else 32

    def fits(self, rows: int, cols: int) -> bool:
        return cols % self.group == 0

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        codes, groups = Part("codes", torch.uint8, (rows, cols // 2)), (rows, cols // self.group)
        if not self.is_nvidia:
            return codes, Part("scales", torch.uint8, groups)
        return codes, Part("scales", torch.float8_e4m3fn, groups), Part("scale", torch.float32, (1, 1), rows)

    def decoded(self, parts: Sequence[Tensor], cols: int) -> Tensor:
        codes, scales, *whole = parts
        numbers = _e2m1(codes.device)[halves(codes).long()].view(len(codes), -1, self.group)
        each = scales.float() * whole[0] if self.is_nvidia else _e8m0(scales.device)[scales.long()]
        return (numbers * each.unsqueeze(-1)).view(len(codes), cols)


def halves(codes: Tensor) -> Tensor:
    """uint8 [rows, n] → uint8 [rows, 2n]: the low half of each byte, then its high half."""
    return torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1)


@cache
def _e8m0(device: torch.device) -> Tensor:
    """All powers of two, exactly. exp2 of CUDA is not exact for the smallest ones."""
    return torch.tensor([2.0**exponent for exponent in range(-127, 129)], device=device)


@cache
def _e2m1(device: torch.device) -> Tensor:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor([*positive, *(-each for each in positive)], device=device)
