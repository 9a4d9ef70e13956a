"""The memory of a model's KV pages on the device. It can grow and shrink while sessions have pages in it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from djinnd.device import Device
from djinnd.engine.memory.memory import KvPlan
from djinnd.engine.tuning import RESIZED_AT_ONCE
from djinnd.kvcache.manager import KvManager
from djinnd.model.step.paged_model import PagedModel


class PageMemory:
    """Owns one model's pool, uint8 [pages, page_bytes], and the block tables of the sessions in it. The pool is
    PagedModel.pool, and the device's budget has it as `kv_label`."""

    def __init__(self, name: str, model: PagedModel, plan: KvPlan, device: Device) -> None:
        self.plan = plan  # of the pool as it is now
        has_states = bool(model.skeleton.stateful)
        self.kv = KvManager(plan.num_pages, plan.page_size, plan.page_bytes, plan.max_context, keeps_states=has_states)
        self._label = kv_label(name)
        self._model = model
        self._device = device

    @property
    def nbytes(self) -> int:
        return self.plan.num_pages * self.plan.page_bytes

    @property
    def half_bytes(self) -> int:
        """Bytes of a page, from its beginning, that hold the KV of the blocks before WeightPlacement.half. 0 for a
        hybrid model: the states of all blocks are at the end of a page."""
        if self._model.has_states:
            return 0
        return self._model.first_byte(self._model.placement.half)

    def bytes_now(self) -> Tensor:
        """The pool. `resize` puts another in its place."""
        return self._model.pool

    def copy(self, source: int, target: int) -> None:
        """Between two steps: copies a whole page, in order with the work that the device still has."""
        with self._device.computing():
            self._model.copy_page(source, target)

    def zero_stale(self) -> None:
        """Clears pages that have changed hands, before a step uses them."""
        stale = self.kv.pool.take_stale()
        if stale:
            self._device.catch_up()  # a copy into a page that has changed hands must not land after the zeros
            self._model.zero_pages(stale)

    @torch.inference_mode()
    def resize(self, num_pages: int) -> None:
        """Moves the pages in use into a pool of `num_pages`, which counts the scratch page. The device is idle. Both
        pools exist meanwhile; without room for that, the pages go by way of the host."""
        moved = self.kv.resize(num_pages)
        device = self._model.pool.device
        old, new = (torch.tensor(list(pages), dtype=torch.long, device=device) for pages in (moved, moved.values()))
        shape = (num_pages, self._model.layout.page_bytes)
        fits = num_pages * self.plan.page_bytes <= self._device.budget.free
        if fits:
            kept = self._model.pool
        else:
            kept, old = self._model.pool.index_select(0, old).cpu(), torch.arange(len(moved))
            self._model.use_pool(self._model.pool[:0].clone())
            self._device.release(self._label)
            self._device.trim()
        pool = self._device.allocate(f"new {self._label}", shape, torch.uint8, zero=True)
        for some, there in zip(old.split(RESIZED_AT_ONCE), new.split(RESIZED_AT_ONCE), strict=True):
            pool.index_copy_(0, there, kept.index_select(0, some).to(pool.device))
        self._device.synchronize()
        self._model.use_pool(pool)
        del kept
        if fits:
            self._device.release(self._label)
        self._device.trim()
        self._device.budget.rename(f"new {self._label}", self._label)
        self.plan = replace(self.plan, num_pages=num_pages)

    def release(self) -> None:
        self._device.release(self._label)


def kv_label(name: str) -> str:
    return f"KV pages of {name}"
