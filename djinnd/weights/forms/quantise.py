"""Quantises plain weights while a model is loaded, if its user has asked for it.

    fp8     e4m3 with a scale for each block of 128 x 128 weights, as DeepSeek-V3's weights are (arXiv 2412.19437)
    int8    with a scale for each 128 neighbouring weights of a row

A scale is the largest magnitude of its group over the largest number of the code. Each weight is rounded to the nearest
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from djinnd.weights.forms.codings import Scaled

CODINGS = {"fp8": Scaled(torch.float8_e4m3fn, 128, 128), "int8": Scaled(torch.int8, 1, 128)}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def encode(coding: Scaled, weights: Tensor, parts: Sequence[Tensor]) -> None:
    """Writes the code of weights [stack, rows, cols], of any float dtype, to the parts, [stack, *Part.shape] each."""
    for matrix, codes, scales in zip(weights, *parts, strict=True):
        rows, cols = matrix.shape
        height, width = coding.block_rows or rows, coding.block_cols or cols
        whole = pad(matrix.float(), (0, -cols % width, 0, -rows % height))
        blocks = whole.view(scales.shape[0], height, scales.shape[1], width)
        largest = blocks.abs().amax((1, 3))
        scales.copy_(torch.where(largest > 0, largest / _LARGEST[coding.codes], 1.0))
        numbers = (blocks / scales[:, None, :, None]).view(whole.shape)[:rows, :cols]
        codes.copy_(numbers.round() if coding.codes is torch.int8 else numbers)


def quantising(
    coding: Scaled, fill: Callable[[Tensor], None], shape: Sequence[int], dtype: torch.dtype
) -> Callable[[Sequence[Tensor]], None]:
    """A function that fills the parts of a parameter of this shape, from one that fills the parameter."""

    def fill_parts(parts: Sequence[Tensor]) -> None:
        plain = torch.empty(tuple(shape), dtype=dtype)
        fill(plain)
        encode(coding, plain.view(-1, *shape[-2:]), parts)

    return fill_parts
