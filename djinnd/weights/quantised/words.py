"""Rearranges integers that are packed in 32-bit words into the codes of Grouped: row by row, even columns low."""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.weights.forms.codings import halves

# AWQ's word of 8 rows has, from the lowest bits on, the rows 0, 2, 4, 6, 1, 3, 5, 7. So its bytes have in their low and
# high halves:
_LOW, _HIGH = (0, 4, 1, 5), (2, 6, 3, 7)


def numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [n, words] → uint8 [n, words * 32 / bits], the lowest bits first. `bits` is 4 or 8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else halves(octets)


def gptq_turn(stored: Tensor, part: Tensor) -> None:
    """int32 [words, rows], words of neighbouring columns → uint8 [rows, bytes]."""
    words, rows = stored.shape
    part.view(rows, words, 4).copy_(stored.view(torch.uint8).view(words, rows, 4).transpose(0, 1))


def awq_turn(stored: Tensor, part: Tensor) -> None:
    """int32 [cols, words of 8 rows] → uint8 [rows, cols / 2]."""
    cols, words = stored.shape
    octets = stored.view(torch.uint8).view(cols // 2, 2, words, 4)
    out = part.view(words, 8, cols // 2)
    for place, (low, high) in enumerate(zip(_LOW, _HIGH, strict=True)):
        even, odd = octets[:, 0, :, place].T, octets[:, 1, :, place].T
        out[:, low] = (even & 15) | (odd << 4)
        out[:, high] = (even >> 4) | (odd & 0xF0)


def awq_numbers(words: Tensor) -> Tensor:
    """int32 [groups, words of 8 rows] → uint8 [groups, rows]."""
    groups, count = words.shape
    octets = words.view(torch.uint8).view(groups, count, 4)
    out = torch.empty(groups, count, 8, dtype=torch.uint8)
    for place, (low, high) in enumerate(zip(_LOW, _HIGH, strict=True)):
        out[:, :, low] = octets[:, :, place] & 15
        out[:, :, high] = octets[:, :, place] >> 4
    return out.view(groups, -1)
