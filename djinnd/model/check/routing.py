"""PinnedRouting: lets all passes of the check at load use the experts that the first pass picked.

Two roundings of a router's scores pick different experts at a near tie. Behind such a block the hidden states differ,
so later routers differ more. In 24 blocks of gpt-oss's kind with random weights, two correct ways of computing a token
end 0.27 of their norm apart, and 0.03 with equal picks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.family.experts import find_picked
from djinnd.model.step.paged_model import PagedModel


class PinnedRouting:
    """A context. Its first pass runs all tokens; then `begin` is called before each pass. Experts on demand are fetched
    as they are pinned."""

    def __init__(self, model: PagedModel) -> None:
        self._modules = [
            block.get_submodule(stack.names[0].rpartition(".")[0])
            for block, stack in zip(model.adapter.blocks, model.skeleton.stacks, strict=True)
            if stack is not None
        ]
        self._first: dict[int, Tensor] = {}  # by module: int64 [tokens, picks]
        self._same: list[Tensor] = []  # shares of a later call's own picks that are pinned
        self._start: int | None = None

    def __enter__(self) -> PinnedRouting:
        self._hooks = [
            module.register_forward_pre_hook(partial(self._pin, number), with_kwargs=True, prepend=True)
            for number, module in enumerate(self._modules)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, position: int) -> None:
        """The next pass runs tokens from this position, and uses the picks of the first pass for them."""
        self._start = position

    def agreement(self) -> float:
        """The mean share of the later passes' own picks that the first pass had too; 1.0 without experts."""
        return float(torch.stack(self._same).mean()) if self._same else 1.0

    def _pin(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        own = find_picked(args, kwargs)
        if self._start is None:
            self._first[number] = own.clone()
            return None
        pinned = self._first[number][self._start : self._start + len(own)]
        self._same.append((own.unsqueeze(2) == pinned.unsqueeze(1)).any(2).float().mean())
        swapped = {id(own): pinned}
        return tuple(swapped.get(id(each), each) for each in args), {
            name: swapped.get(id(each), each) for name, each in kwargs.items()
        }
