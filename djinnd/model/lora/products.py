"""LoraProducts: the products of resident adapters, added to the model's own while a step runs.

Adapters are in slots, which a step's rows name (adapter_rows.py). A step without adapters computes nothing here. The
base model's product may read its weights in any form: only its input and its result are used.

On CUDA two kernels find the matrices by a table of addresses, so a captured graph serves any adapters. On the CPU, and
if the kernels cannot be compiled, a loop over the tiles computes the products; on CUDA it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from djinnd.model.adapter_rows import NO_SLOT, AdapterRows
from djinnd.model.copies.upload import upload
from djinnd.model.lora.image import Pair
from djinnd.model.lora.targets import Target


class LoraProducts:
    """Used by the engine's thread. Slots change only between two steps."""

    def __init__(self, targets: Sequence[Target], slots: int, device: torch.device) -> None:
        """Installs itself at the targets, for as long as the model lives."""
        self.targets = targets
        self.rows: AdapterRows | None = None  # of the step; None: no token has an adapter
        self.has_kernels = device.type == "cuda"
        self._slots: list[dict[int, Pair]] = [{} for _ in range(slots)]
        if self.has_kernels:
            from djinnd.model.kernels.launching.scratch import Scratch  # Triton comes with CUDA builds of torch
            from djinnd.model.kernels.products.adapters import FIELDS

            self._table = torch.zeros((len(targets), slots, FIELDS), dtype=torch.int64, device=device)
            self._scratch = Scratch(device)
        for index, target in enumerate(targets):
            target.add(partial(self._add, index))

    def fill(self, slot: int, pairs: dict[int, Pair]) -> None:
        """Puts an adapter into a slot. pairs: on the model's device, by the number of their target. On CUDA, the
        calling thread is `computing`."""
        self._slots[slot] = pairs
        if self.has_kernels:
            entries = [[0] * self._table.shape[2] for _ in self.targets]
            for target, (a, b) in pairs.items():
                entries[target] = [a.data_ptr(), b.data_ptr(), b.shape[1]]
            self._table[:, slot].copy_(upload(entries, torch.int64, self._table.device))

    def clear(self, slot: int) -> None:
        """Drops all references to the adapter's memory."""
        self._slots[slot] = {}

    @torch.inference_mode()
    def launch_empty(self, dtype: torch.dtype) -> None:
        """Launches each kernel with a tile of no adapter, so that its variants can be listed. Only for CUDA."""
        device = self._table.device
        nothing = torch.tensor([[NO_SLOT, 0, 0]], dtype=torch.int32, device=device)
        rows = AdapterRows(torch.zeros(1, dtype=torch.int32, device=device), nothing)
        numbers = {(target.inputs, target.sizes): index for index, target in enumerate(self.targets)}
        for (inputs, sizes), index in numbers.items():
            x, y = (torch.zeros(1, width, dtype=dtype, device=device) for width in (inputs, sum(sizes)))
            self._launch(index, x, y, rows)

    def _add(self, target: int, x: Tensor, y: Tensor) -> None:
        """Adds the adapters' products for input x [..., in] to y [..., out], for all tokens of the step."""
        rows = self.rows
        if rows is None:
            return
        x, y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        assert len(x) == len(rows.order), "a target gets the tokens of the step, in their order"
        if self.has_kernels and self._launch(target, x, y, rows):
            return
        for slot, first, count in rows.tiles.tolist():
            if slot == NO_SLOT:
                return
            pair = self._slots[slot].get(target)
            if pair is not None:
                self._add_tile(pair, self.targets[target].sizes, rows.order[first : first + count].long(), x, y)

    def _launch(self, target: int, x: Tensor, y: Tensor, rows: AdapterRows) -> bool:
        """Adds the products by kernels. → False if they cannot be compiled for this device."""
        from djinnd.model.kernels.launching.launches import UNAVAILABLE  # Triton comes with CUDA builds of torch
        from djinnd.model.kernels.products.adapters import add_products

        try:
            add_products(x.contiguous(), y, rows, self._table[target], self.targets[target].sizes, self._scratch)
        except UNAVAILABLE:
            self.has_kernels = False
        return self.has_kernels

    def _add_tile(self, pair: Pair, sizes: Sequence[int], tokens: Tensor, x: Tensor, y: Tensor) -> None:
        low = torch.mm(x.index_select(0, tokens), pair.a.T)
        parts = zip(low.split(pair.rank, 1), pair.b.split(sizes), y.split(sizes, 1), strict=True)
        for through, b, part in parts:
            part.index_add_(0, tokens, torch.mm(through, b.T))
