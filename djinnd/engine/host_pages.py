"""HostPages: the memory of one model's host tier, mapped, and pinned piece by piece while sessions run.

    │ table │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ …    each slot a page, up to a multiple of 4096 bytes
            └────── piece ────┴────── piece ────┴ …    pinned one by one; no slot lies in two of them

It is an object of the arena, which outlives the engine: the table, as in kvcache/tier.py, says which slots are whole.

While the driver pins, whatever else the process asks of it waits: 21 GB in pieces of 1 GiB kept a first token for two
seconds. So pieces are small, and a thread pins one after another, those first that somebody wants to copy to or from,
the others half of the time while steps are run, and not before those have had their calls answered who have waited for
the model.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinnd.device import Device
from djinnd.engine.memory import ModelShape, slot_bytes
from djinnd.kvcache.tier import Tier

log = logging.getLogger("djinnd.engine")

PIECE = 64 << 20  # bytes: some ten milliseconds of pinning
HEAD_START = 2.0  # seconds that who has waited for the model has before pieces are pinned that nobody wants yet
_LOOK = 0.01  # seconds between looks, meanwhile, whether somebody wants one
_PAUSE = 0.001  # seconds after a piece; beside steps as long as it took, where nobody waits for one
_LAYOUT = 2  # of a page's bytes and a tier's table; another one when pages that were kept are of use no more


class HostPages:
    """Used by the engine's thread; a thread of its own pins.

    `table` is writable, and Tier's to write. A copy of neighbouring slots must not reach over a multiple of
    `piece_slots`, and begins when `is_ready`. Whoever holds the table or a slot keeps the memory mapped."""

    def __init__(self, memory: Tensor, page_bytes: int, device: Device) -> None:
        """`memory`: uint8 [object_bytes(slots, page_bytes)], shared, beginning on a host page."""
        self.capacity = slots_in(memory.numel(), page_bytes)
        self.page_bytes = page_bytes
        self._device = device
        start, size = Tier.table_bytes(self.capacity), slot_bytes(page_bytes)
        self.table = memory[:start].numpy().data
        assert self.capacity > 0, f"{memory.numel()} bytes have no room for a page of {page_bytes}"
        self._slots = memory[start : start + self.capacity * size].view(self.capacity, size)
        self.piece_slots = max(PIECE // size, 1)
        self._pieces = [piece.reshape(-1) for piece in self._slots.split(self.piece_slots)]
        self._is_pinned = [False] * len(self._pieces)
        self.pinned = 0  # slots
        self._wanted: list[int] = []  # the last is the first to be pinned
        self._closed = threading.Event()
        self.failure: OutOfMemory | None = None  # why no more is pinned
        self._thread = threading.Thread(target=self._pin, name="djinn-pin", daemon=True)
        self._thread.start()

    def _pin(self) -> None:
        began, rest = time.monotonic(), iter(range(len(self._pieces)))
        while not self._closed.is_set():
            is_wanted = bool(self._wanted)
            if not is_wanted and time.monotonic() < began + HEAD_START:
                self._closed.wait(_LOOK)
                continue
            index = self._wanted.pop() if is_wanted else next(rest, None)
            if index is None:
                log.info("host_pages_pinned bytes=%d seconds=%.2f", self._slots.nbytes, time.monotonic() - began)
                return
            if self._is_pinned[index]:
                continue
            pinning, computed = time.monotonic(), self._device.computed
            try:
                self._device.pin([self._pieces[index]])
            except OutOfMemory as error:
                log.warning("host_pages_not_pinned error=%s", error.message)
                self.failure = error
                return
            self._is_pinned[index] = True
            self.pinned += self._pieces[index].numel() // self._slots.shape[1]
            spares = not is_wanted and self._device.computed > computed
            self._closed.wait(max(_PAUSE, time.monotonic() - pinning) if spares else _PAUSE)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self._slots.nbytes

    def is_ready(self, slot: int) -> bool:
        """Whether copies to and from it run at the speed of the bus. Where it is not pinned yet, it will be next. Where
        it cannot be pinned at all, copies take the time that they take."""
        piece = slot // self.piece_slots
        if self._is_pinned[piece] or self.failure is not None:
            return True
        if piece not in self._wanted:
            self._wanted.append(piece)
        return False

    @property
    def is_dense(self) -> bool:
        """Whether neighbouring pages lie without a gap."""
        return self._slots.shape[1] == self.page_bytes

    def slots(self, first: int, count: int) -> Tensor:
        """uint8 [count, page_bytes]: the pages themselves."""
        return self._slots[first : first + count, : self.page_bytes]

    def slot(self, index: int) -> Tensor:
        """uint8 [page_bytes]: the page itself."""
        return self._slots[index, : self.page_bytes]

    def extent(self, index: int) -> npt.NDArray[np.uint8]:
        """uint8 [a multiple of 4096]: the page and what it is rounded up with."""
        return self._slots[index].numpy()

    def stop(self) -> None:
        """No more of it is pinned."""
        self._closed.set()
        self._thread.join()

    def release(self) -> None:
        """No copy is under way, and nothing is done with slots or table any more."""
        self.stop()
        self._device.unpin([piece for piece, pinned in zip(self._pieces, self._is_pinned, strict=True) if pinned])
        self._pieces = []
        self.table = memoryview(b"")
        self._slots = torch.empty(0, 0, dtype=torch.uint8)


def object_bytes(slots: int, page_bytes: int) -> int:
    """Of table and slots."""
    return Tier.table_bytes(slots) + slots * slot_bytes(page_bytes)


def slots_in(nbytes: int, page_bytes: int) -> int:
    """The most slots that so many bytes have room for."""
    size = slot_bytes(page_bytes)
    slots = max(nbytes - Tier.table_bytes(nbytes // size), 0) // size
    while object_bytes(slots + 1, page_bytes) <= nbytes:
        slots += 1
    return slots


def pages_fingerprint(weights: str, dtype: torch.dtype, shape: ModelShape, page_size: int) -> str:
    """Of what a page's bytes follow from, beside its tokens. `weights`: the fingerprint of theirs; `dtype`: of KV."""
    geometry = f"{page_size} {shape.num_blocks} {shape.kv_heads} {shape.head_dim}"
    return hashlib.sha256(f"{weights} {dtype} {geometry} {_LAYOUT}".encode()).hexdigest()
