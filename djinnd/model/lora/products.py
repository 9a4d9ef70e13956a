"""LoraProducts: the products of resident adapters, added to the model's own while a step runs.

Adapters are in slots, which a step's rows name (adapter_rows.py). A step without adapters computes nothing here. The
base model's product may read its weights in any form: only its input and its result are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from djinnd.model.adapter_rows import NO_SLOT, AdapterRows
from djinnd.model.lora.image import Pair
from djinnd.model.lora.targets import Target


class LoraProducts:
    """Used by the engine's thread. Slots change only between two steps."""

    def __init__(self, targets: Sequence[Target], slots: int) -> None:
        """Installs itself at the targets, for as long as the model lives."""
        self.targets = targets
        self.rows: AdapterRows | None = None  # of the step; None: no token has an adapter
        self._slots: list[dict[int, Pair]] = [{} for _ in range(slots)]
        for index, target in enumerate(targets):
            target.add(partial(self._add, index))

    def fill(self, slot: int, pairs: dict[int, Pair]) -> None:
        """Puts an adapter into a slot. pairs: on the model's device, by the number of their target."""
        self._slots[slot] = pairs

    def clear(self, slot: int) -> None:
        """Drops all references to the adapter's memory."""
        self._slots[slot] = {}

    def _add(self, target: int, x: Tensor, y: Tensor) -> None:
        """Adds the adapters' products for input x [..., in] to y [..., out], for all tokens of the step."""
        rows = self.rows
        if rows is None:
            return
        x, y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        assert len(x) == len(rows.order), "a target gets the tokens of the step, in their order"
        for slot, first, count in rows.tiles.tolist():
            if slot == NO_SLOT:
                return
            pair = self._slots[slot].get(target)
            if pair is not None:
                self._add_tile(pair, self.targets[target].sizes, rows.order[first : first + count].long(), x, y)

    def _add_tile(self, pair: Pair, sizes: Sequence[int], tokens: Tensor, x: Tensor, y: Tensor) -> None:
        low = torch.mm(x.index_select(0, tokens), pair.a.T)
        parts = zip(low.split(pair.rank, 1), pair.b.split(sizes), y.split(sizes, 1), strict=True)
        for through, b, part in parts:
            part.index_add_(0, tokens, torch.mm(through, b.T))
