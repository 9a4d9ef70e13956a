"""Granite and its relatives multiply what attention and MLP give by one factor, and add it to the residual stream then.

Here the modules multiply their own outputs, so that edits and captures at them see what is added. The product is the
same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

FAMILIES = (
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
)
_MLPS = ("mlp", "block_sparse_moe", "shared_mlp")


def move(blocks: Iterable[nn.Module]) -> None:
    """Takes the factor from each block and gives it to the block's attention and MLP."""
    for block in blocks:
        branches = _branches(block)
        if branches:
            factor: Any = block.residual_multiplier
            multiply = partial(_multiply, factor)
            for branch in branches:
                branch.register_forward_hook(multiply)  # the first hook, so all others see the product
            block.residual_multiplier = 1.0  # type: ignore[assignment]  # exact: x * 1.0 is x


def _branches(block: nn.Module) -> list[nn.Module]:
    """Empty where the factor has to stay: the sum of two MLPs is multiplied, which rounds differently from the sum of
    two products."""
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
