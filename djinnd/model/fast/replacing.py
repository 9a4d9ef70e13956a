"""Replaces modules within a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(root: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts `replacement(module)` in the place of every module below `root` for which it is not None."""
    for parent in root.modules():
        for name, module in list(parent._modules.items()):
            if module is not None and (new := replacement(module)) is not None:
                setattr(parent, name, new)
