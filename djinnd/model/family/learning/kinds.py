"""Kinds of blocks: blocks of one kind differ only in their weights, so what is learnt from one holds for all."""

from __future__ import annotations

from torch import nn


def kind_of(block: nn.Module) -> object:
    """Everything of a block that a forward can branch on: its modules and their plain attributes."""
    return tuple(
        (path, type(module), tuple(sorted((k, str(v)) for k, v in vars(module).items() if _is_plain(k, v))))
        for path, module in block.named_modules()
    )


def _is_plain(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float | str) and name != "layer_idx"
