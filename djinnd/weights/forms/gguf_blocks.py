"""GGUF's formats as codings: the bytes of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.gguf.formats import FORMATS
from djinnd.weights.forms.coding import Coding, Part
from djinnd.weights.gguf.blocks import decode


@dataclass(frozen=True, slots=True)
class GgufBlocks(Coding):
    """Blocks of one of GGUF's quantised formats: uint8 [rows, bytes of a row]. `number` is the format's in the file."""

    number: int

    @property
    def name(self) -> str:
        return FORMATS[self.number].name

    def fits(self, rows: int, cols: int) -> bool:
        return cols % FORMATS[self.number].weights == 0

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        form = FORMATS[self.number]
        return (Part("blocks", torch.uint8, (rows, cols // form.weights * form.nbytes)),)

    def decoded(self, parts: Sequence[Tensor], cols: int) -> Tensor:
        return decode(self.number, parts[0].contiguous()).view(-1, cols)
