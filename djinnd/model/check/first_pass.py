"""FirstPass: lets the later passes of the check at load start each block where the first pass started it.

Roundings add up over the blocks, and in some models they grow: two correct ways of computing 40 blocks of gated delta
rule and experts end 0.33 of their norm apart in bfloat16. With given inputs only the roundings of one block count, and
a fault shows in the block that has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.step.paged_model import PagedModel

TINY = torch.finfo(torch.float32).tiny


class FirstPass:
    """A context. Its first pass runs all tokens; then `begin` is called before each pass. Keeps each block's input on
    the device, [1, tokens, width], and the last block's output."""

    def __init__(self, model: PagedModel) -> None:
        self._blocks = list(model.adapter.blocks)
        self._given: list[Tensor] = []
        self._start: int | None = None
        self._errors: list[list[Tensor]] = []  # of each later pass: of the prologue and of each block, float32 [tokens]

    def __enter__(self) -> FirstPass:
        self._hooks = [
            each
            for index, block in enumerate(self._blocks)
            for each in (
                block.register_forward_pre_hook(partial(self._give, index)),
                block.register_forward_hook(partial(self._compare, index)),
            )
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, position: int) -> None:
        """The next pass runs tokens from this position, and gets what the first pass had for them."""
        self._start = position
        self._errors.append([])

    def errors(self, passes: slice) -> Tensor:
        """Errors of these later passes, float32 [1 + blocks]: of the embeds, ‖own - first‖ / ‖first‖, and of each
        block, as `change_error` has it. The median over the tokens of the passes counts."""
        chosen = self._errors[passes]
        return torch.stack([torch.cat(each).median() for each in zip(*chosen, strict=True)]).cpu()

    def _give(self, index: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0]
        if self._start is None:
            self._given.append(hidden.clone())  # a block may write over its input
            return None
        given = self._rows(index, hidden.shape[1])
        if index == 0:
            distance, norm = (hidden.float() - given.float()).norm(dim=2), given.float().norm(dim=2)
            self._errors[-1].append((distance / norm.clamp(min=TINY))[0])
        return given.clone(), *args[1:]

    def _compare(self, index: int, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if self._start is not None:
            tokens = hidden.shape[1]
            error = change_error(hidden, self._rows(index + 1, tokens), self._rows(index, tokens))
            self._errors[-1].append(error[0])
        elif index + 1 == len(self._blocks):
            self._given.append(hidden.clone())

    def _rows(self, index: int, tokens: int) -> Tensor:
        assert self._start is not None
        return self._given[index][:, self._start : self._start + tokens]


def change_error(out: Tensor, wanted: Tensor, given: Tensor) -> Tensor:
    """‖out - wanted‖ / ‖wanted - given‖ of each token, in float32: an error beside what the block adds to its input.

    Differences of one rounding of `wanted` do not count: they are much of what a block adds to a large input. All
    arguments [1, tokens, width] → [1, tokens].
    """
    rounding = torch.finfo(out.dtype).eps * wanted.abs().float()
    beyond = ((out.float() - wanted.float()).abs() - rounding).clamp(min=0)
    change = (wanted.float() - given.float()).norm(dim=2)
    return beyond.norm(dim=2) / change.clamp(min=TINY)
