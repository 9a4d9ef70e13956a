"""Granite and related families: the outputs of attention and MLP are multiplied by a factor before they are added to
the residual stream.

Here the modules multiply their own outputs, so that edits and captures see the numbers that are added. The result is
equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

FAMILIES = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared")
_MLPS = ("mlp", "block_sparse_moe", "shared_mlp")


def move(blocks: Iterable[nn.Module]) -> None:
    """Moves the factor of each block into its attention and MLP."""
    for block in blocks:
        branches = _branches(block)
        if branches:
            factor: Any = block.residual_multiplier
            multiply = partial(_multiply, factor)
            for branch in branches:
                branch.register_forward_hook(multiply)  # the first hook, so that all others see the product
            block.residual_multiplier = 1.0  # type: ignore[assignment]  # exact: x * 1.0 is x


def _branches(block: nn.Module) -> list[nn.Module]:
    """The block's attention and MLP; empty if the factor has to stay. A block with two MLPs multiplies their sum, which
    rounds differently from the sum of two products."""
    attention = getattr(block, "self_attn", None)
    mlps = [mlp for name in _MLPS if (mlp := getattr(block, name, None)) is not None]
    if attention is None or len(mlps) != 1:
        return []
    return [attention, *mlps]


def _multiply(factor: float, module: nn.Module, given: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output * factor
    hidden, *others = output
    return (hidden * factor, *others)
