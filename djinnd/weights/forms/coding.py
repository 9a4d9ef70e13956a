"""Coding: how a matrix of weights is stored in fewer bits than 16 a weight.

A coded matrix [rows, cols] consists of parts: the codes, and the scales of groups of weights. Each part is a
two-dimensional tensor of its own dtype. Row r of a part belongs to the matrix rows [r * step, (r + 1) * step). So a
range of rows can be decoded alone if it begins at a multiple of the largest step below `rows`.

    codes   [rows, …]                  step 1
    scales  [ceil(rows / 128), …]      step 128, for scales of blocks of 128 x 128 weights
    scale   [1, 1]                     step rows, for one scale of the whole matrix

Equal matrices, such as a block's experts, are coded as stacks: each part then has one more dimension, the first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 22  # weights that are decoded at a time; bounds the temporaries, which are float32


class Part(NamedTuple):
    """One tensor of a coded matrix. `step`: rows of the matrix for each row of the part."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    step: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Coding(ABC):
    """A code of matrices. Subclasses are frozen dataclasses, so equal codes compare equal."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that people know: fp8, int4, Q4_K."""

    @abstractmethod
    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """The parts of a matrix [rows, cols] for which `fits`."""

    @abstractmethod
    def fits(self, rows: int, cols: int) -> bool:
        """Returns True if the code can hold matrices of this shape."""

    @abstractmethod
    def decoded(self, parts: Sequence[Tensor], cols: int) -> Tensor:
        """The weights, float32 [rows, cols], of whole rows: the matching rows of each part, on any device."""

    def nbytes(self, rows: int, cols: int) -> int:
        return sum(part.nbytes for part in self.parts(rows, cols))

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes the weights to `out`, computed in float32 and rounded once to its dtype.

        parts: of a stack of matrices, [stack, *shape] each. out: [stack, rows, cols], maybe a transposed view.
        """
        _, rows, cols = out.shape
        described = self.parts(rows, cols)
        assert [tuple(part.shape[1:]) for part in parts] == [each.shape for each in described]
        least = max((each.step for each in described if each.step < rows), default=1)
        step = max(PIECE // (least * cols), 1) * least
        for matrix in range(len(out)):
            for first in range(0, rows, step):
                end = min(first + step, rows)
                own = [
                    part[matrix, first // each.step : -(-end // each.step)]
                    for part, each in zip(parts, described, strict=True)
                ]
                out[matrix, first:end].copy_(self.decoded(own, cols))
