"""How the weights of a coded matrix lie in a kernel's tiles.

A kernel goes through a row's codes byte by byte. A byte holds the code of one column, or of two: a low and a high one.

    span 0     byte i is column i
    span 1     byte i has columns 2i (low half) and 2i + 1 (high half)
    span n     2n columns share n bytes: byte i has columns i // n * 2n + i % n (low) and the one n further (high)

A tile is [rows, runs, run] bytes. The bytes of a run share their scales, which are loaded once for a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from djinnd.gguf.formats import FORMATS
from djinnd.model.kernels.coded import kinds
from djinnd.model.kernels.launching.gpu import has_fp8
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks


@dataclass(frozen=True, slots=True)
class Facts:
    """The layout of one matrix. `group` counts bytes of codes that share a scale, `groups` the scales of a row, and
    `step` the rows that share a row of scales. `stride`: bytes of a row of GGUF's blocks, with their scales; else 0."""

    kind: int
    row_bytes: int
    span: int
    group: int
    groups: int
    step: int = 1
    stride: int = 0
    has_zeros: bool = False
    has_order: bool = False

    @property
    def run(self) -> int:
        """The most bytes of a run, a power of two. Runs begin at its multiples, so none has two scales, except by
        order."""
        if self.groups == 1 or self.has_order:
            return triton.next_power_of_2(self.row_bytes)
        return self.group & -self.group

    def options(self, device: torch.device) -> dict[str, int | bool]:
        """The constants of `load_weights`."""
        return {
            "KIND": self.kind, "ROW": self.row_bytes, "SPAN": self.span, "GROUP": self.group, "GROUPS": self.groups,
            "STRIDE": self.stride or self.row_bytes, "ZEROS": self.has_zeros, "ORDER": self.has_order,
            "NATIVE": has_fp8(device),
        }  # fmt: skip


def facts_of(coding: Coding, rows: int, cols: int) -> Facts | None:
    """None if kernels cannot decode it."""
    if not coding.fits(rows, cols):
        return None
    match coding:
        case Scaled(codes, block_rows, block_cols):
            width = block_cols or cols
            return Facts(kinds.OF_CODES[codes], cols, 0, width, -(-cols // width), block_rows or rows)
        case Float4():
            float4 = kinds.NVFP4.value if coding.is_nvidia else kinds.MXFP4.value
            return Facts(float4, cols // 2, 1, coding.group // 2, cols // coding.group)
        case Grouped(bits, group):
            if group * bits % 8:
                return None
            kind, span = (kinds.NIBBLES.value, 1) if bits == 4 else (kinds.BYTES.value, 0)
            return Facts(
                kind, cols * bits // 8, span, group * bits // 8, cols // group,
                has_zeros=coding.has_zeros, has_order=coding.has_order,
            )  # fmt: skip
        case GgufBlocks(number) if number in kinds.GGUF_RUNS:
            columns, span = kinds.GGUF_RUNS[number]
            halves = 2 if span else 1  # of a byte
            stride = cols // FORMATS[number].weights * FORMATS[number].nbytes
            # As scales, kernels get the blocks as 16-bit floats.
            of_file = kinds.GGUF.value + number
            return Facts(of_file, cols // halves, span, columns // halves, stride // 2, stride=stride)
    return None


def arguments(facts: Facts, parts: Sequence[Tensor]) -> list[Tensor]:
    """The four tensors that kernels take: codes, scales, then zeros and order, or the scale of the whole. FP8 passes as
    its bytes. Arguments that a coding lacks are not read."""
    found = [part.view(torch.uint8) if part.dtype is torch.float8_e4m3fn else part for part in parts]
    if facts.stride:
        found.append(found[0].view(torch.float16))
    if facts.has_order and not facts.has_zeros:
        found.insert(2, found[0])
    return (found + [found[0]] * 3)[:4]
