"""The memory of one model's host tier: mapped at once, and pinned in pieces while sessions run.

    │ table │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ …    a slot is a page, rounded up to a multiple of 4096 bytes
            └────── piece ────┴────── piece ────┴ …    pinned one by one; a slot is in one piece

The memory is an object of the arena, which outlives the engine. The table (kvcache/tier.py) says which slots are whole.

While the driver pins memory, all other calls of the process to the driver wait. Pinning 21 GB in pieces of 1 GiB
delayed a first token by two seconds; small pieces back to back let no other call in. So pieces are small, and one
thread pins them one after another. Pieces that a copy waits for come first. The others are pinned with rests between
them while steps run, and for a while after a step, such as the steps of the check at a load.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinnd.device import Device
from djinnd.engine.memory.memory import ModelShape
from djinnd.engine.tuning import PIN_PAUSE, PIN_QUIET, PIN_REST, PINNED_PIECE
from djinnd.kvcache.tier import Tier, whole_pages
from djinnd.model.step.page_regions import layout_of

log = logging.getLogger("djinnd.engine")

_LAYOUT = 2  # version of the layout of pages and tables; a new one makes pages of earlier engines unusable


class HostPages:
    """Used by the engine's thread; another thread pins.

    Tier writes `table`. A copy of neighbouring slots must not cross a multiple of `piece_slots`, and begins when the
    slots are `is_ready`. References to the table or a slot keep the memory mapped.
    """

    def __init__(self, memory: Tensor, page_bytes: int, device: Device) -> None:
        """`memory`: uint8 [object_bytes(slots, page_bytes)], shared, aligned to a host page."""
        self.capacity = slots_in(memory.numel(), page_bytes)
        self.page_bytes = page_bytes
        self._device = device
        start, size = Tier.table_bytes(self.capacity), whole_pages(page_bytes)
        self.table = memory[:start].numpy().data
        assert self.capacity > 0, f"{memory.numel()} bytes have no room for a page of {page_bytes}"
        self._slots = memory[start : start + self.capacity * size].view(self.capacity, size)
        self.piece_slots = max(PINNED_PIECE // size, 1)
        self._pieces = [piece.reshape(-1) for piece in self._slots.split(self.piece_slots)]
        self._is_pinned = [False] * len(self._pieces)
        self.pinned = 0  # slots
        self._now_ready: deque[int] = deque()  # pieces that `take_ready` has not returned yet
        self._wanted: list[int] = []  # pieces that copies wait for; the last is pinned first
        self._closed = False
        self._called = threading.Event()  # set when a piece is wanted, or when this is closed
        self.failure: OutOfMemory | None = None  # reason why no more is pinned
        self._thread = threading.Thread(target=self._pin, name="djinn-pin", daemon=True)
        self._thread.start()

    def _pin(self) -> None:
        began, others, resting_until = time.monotonic(), iter(range(len(self._pieces))), 0.0
        while True:
            self._called.clear()
            if self._closed:
                return
            if self._wanted:
                index = self._wanted.pop()
            elif (seconds := resting_until - time.monotonic()) > 0:
                self._called.wait(seconds)
                continue
            elif (other := next(others, None)) is not None:
                index = other
            else:
                log.info("host_pages_pinned bytes=%d seconds=%.2f", self._slots.nbytes, time.monotonic() - began)
                return
            if self._is_pinned[index]:
                continue
            pinning = time.monotonic()
            try:
                self._device.pin([self._pieces[index]])
            except OutOfMemory as error:
                log.warning("host_pages_not_pinned error=%s", error.message)
                self.failure = error
                self._now_ready.extend(index for index, pinned in enumerate(self._is_pinned) if not pinned)
                return
            self._is_pinned[index] = True
            self._now_ready.append(index)
            self.pinned += self._pieces[index].numel() // self._slots.shape[1]
            now = time.monotonic()
            if self._device.idle_s < PIN_QUIET:
                resting_until = now + PIN_REST * (now - pinning)
            time.sleep(PIN_PAUSE)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self._slots.nbytes

    def is_ready(self, slot: int) -> bool:
        """True if copies of the slot run at the speed of the bus. If the slot is not pinned yet, its piece is pinned
        next. If pinning has failed, always True: copies are slow then."""
        piece = slot // self.piece_slots
        if self._is_pinned[piece] or self.failure is not None:
            return True
        if piece not in self._wanted:
            self._wanted.append(piece)
            self._called.set()
        return False

    def take_ready(self) -> Iterator[range]:
        """The slots that have become ready since the last call."""
        while self._now_ready:
            first = self._now_ready.popleft() * self.piece_slots
            yield range(first, min(first + self.piece_slots, self.capacity))

    @property
    def is_dense(self) -> bool:
        """True if neighbouring pages are contiguous."""
        return self._slots.shape[1] == self.page_bytes

    def slots(self, first: int, count: int) -> Tensor:
        """uint8 [count, page_bytes]: a view of the pages."""
        return self._slots[first : first + count, : self.page_bytes]

    def slot(self, index: int) -> Tensor:
        """uint8 [page_bytes]: a view of the page."""
        return self._slots[index, : self.page_bytes]

    def extent(self, index: int) -> npt.NDArray[np.uint8]:
        """uint8 [multiple of 4096]: a view of the page and its padding."""
        return self._slots[index].numpy()

    def stop(self) -> None:
        """Stops pinning."""
        self._closed = True
        self._called.set()
        self._thread.join()

    def release(self) -> None:
        """Unpins and drops the memory. No copy may be in flight, and no slot or table may be in use."""
        self.stop()
        self._device.unpin([piece for piece, pinned in zip(self._pieces, self._is_pinned, strict=True) if pinned])
        self._pieces = []
        self.table = memoryview(b"")
        self._slots = torch.empty(0, 0, dtype=torch.uint8)


def object_bytes(slots: int, page_bytes: int) -> int:
    """Bytes of a table and its slots."""
    return Tier.table_bytes(slots) + slots * whole_pages(page_bytes)


def slots_in(nbytes: int, page_bytes: int) -> int:
    """The most slots that fit."""
    size = whole_pages(page_bytes)
    slots = max(nbytes - Tier.table_bytes(nbytes // size), 0) // size
    while object_bytes(slots + 1, page_bytes) <= nbytes:
        slots += 1
    return slots


def page_file_name(model: str, fingerprint: str) -> str:
    """The name of a model's page file. Two models of one checkpoint have a file each, which the next engine finds by
    the model's name."""
    return hashlib.sha256(f"{model} {fingerprint}".encode()).hexdigest()[:16]


def pages_fingerprint(weights: str, dtype: torch.dtype, shape: ModelShape, page_size: int) -> str:
    """Identifies everything that a page's bytes depend on, except its tokens. `weights`: fingerprint of the weights;
    `dtype`: of computing."""
    layout = layout_of(shape.kv_dtype(dtype), page_size, shape.kv, shape.state_bytes)
    geometry = f"{page_size} {layout.blocks} {layout.kv_heads} {layout.head_dim}"
    if not layout.is_uniform:
        geometry += f" {layout.shapes}"
    if shape.has_fp8_kv:
        geometry += f" {layout.dtype}"
    if layout.state_bytes:
        geometry += f" {layout.state_bytes} bytes of state"
    return hashlib.sha256(f"{weights} {dtype} {geometry} {_LAYOUT}".encode()).hexdigest()
