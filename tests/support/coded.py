"""Coded matrices with random contents."""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.weights.forms.coding import Coding


def random_parts(coding: Coding, rows: int, cols: int, stack: int = 1) -> list[Tensor]:
    """Parts with random bytes where any byte is a code, and with moderate scales."""
    made = []
    for part in coding.parts(rows, cols):
        shape = (stack, *part.shape)
        if part.name == "order":
            groups = cols // coding.group  # type: ignore[attr-defined]
            made.append(torch.randperm(cols).view(shape[1:]).expand(shape).remainder(groups).int())
        elif part.dtype.is_floating_point and part.name != "codes":
            made.append((torch.rand(shape) + 0.5).to(part.dtype))
        elif part.dtype is torch.float8_e4m3fn:
            made.append(torch.randn(shape).to(part.dtype))
        elif part.name == "scales":  # exponents
            made.append(torch.randint(120, 130, shape, dtype=torch.uint8))
        elif part.name == "blocks":
            made.append(torch.randint(256, shape, dtype=torch.uint8) & 0xBF)  # no half float is infinite
        else:
            low, high = (-128, 128) if part.dtype is torch.int8 else (0, 256)
            made.append(torch.randint(low, high, shape).to(part.dtype))
    return made
