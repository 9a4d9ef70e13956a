"""AdapterResidency: which adapters of one model are on the device.

    host     all adapters that the server has loaded, until it drops them
    device   those of requests under way, and as many of the others as fit: the longest unused one gives way first

An adapter's memory on the device is its own, under the budget. Kernels find it by its slot, which a step's rows name.

A load may set memory aside for adapters, the *room*. It is a reservation without memory: as much as an adapter takes is
released from it when the adapter comes, and reserved again when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from djinn_client.errors import AdapterNotFound, OutOfMemory
from djinnd.core.batch import Row
from djinnd.device import CopyLane, Device
from djinnd.model.adapter_rows import NO_SLOT
from djinnd.model.lora.image import LoraImage
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import SLOTS


class AdapterResidency:
    """Used by the engine's thread. Adapters come to the device, and leave it, only between two steps."""

    def __init__(self, device: Device, model: str, paged: PagedModel, room: int = 0) -> None:
        """`room`: bytes that are reserved as `room_label(model)`; 0: there is no such reservation."""
        self._room = room
        self._device = device
        self._model = model
        self._paged = paged
        self._images: dict[bytes, LoraImage] = {}  # on the host, by identity
        self._slots: dict[bytes, int] = {}  # of those on the device, the longest unused first
        self._free = list(range(SLOTS))
        self._users: dict[int, bytes] = {}  # by request under way

    def __contains__(self, identity: object) -> bool:
        return identity in self._images

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget, with the room that no adapter takes."""
        return max(self._resident_bytes, self._room)

    @property
    def _resident_bytes(self) -> int:
        return sum(self._images[identity].memory.nbytes for identity in self._slots)

    @property
    def resident(self) -> list[bytes]:
        """Identities of the adapters on the device."""
        return [*self._slots]

    @property
    def can_be_captured(self) -> bool:
        """True if a CUDA graph can hold the adapters' products."""
        return self._paged.install_adapters().has_kernels

    def add(self, image: LoraImage) -> None:
        """Takes an adapter that was read for this model."""
        self._images.setdefault(image.identity, image)

    def drop(self, identity: bytes) -> None:
        """Forgets an adapter. Requests under way that use it have been cancelled, or have ended."""
        if identity in self._slots:
            self._leave(identity)
        self._images.pop(identity, None)

    # --- requests -----------------------------------------------------------------------------------------------------

    def is_ready(self, identity: bytes) -> bool:
        """True if a request of a session with this adapter needs no memory for it. b"": no adapter."""
        return not identity or identity in self._slots

    def use(self, request: int, identity: bytes) -> None:
        """Brings the adapter to the device, and keeps it there until `let_go`. b"": no adapter.

        Raises AdapterNotFound, and OutOfMemory with the figures; then the request uses none.
        """
        if not identity:
            return
        if identity not in self._images:
            raise AdapterNotFound(f"{self._model} has lost the session's adapter: try again", adapter=identity.hex())
        if identity not in self._slots:
            self._come(identity)
        self._slots[identity] = self._slots.pop(identity)  # now the last to leave
        self._users[request] = identity

    def let_go(self, request: int) -> None:
        """The request has ended. Does nothing if it has no adapter."""
        self._users.pop(request, None)

    def slots_of(self, rows: Iterable[Row]) -> list[int]:
        """The slot of each row; NO_SLOT for a session without an adapter."""
        slots = self._slots
        return [slots[row.session.adapter] if row.session.adapter else NO_SLOT for row in rows]

    # --- the device ---------------------------------------------------------------------------------------------------

    def _come(self, identity: bytes) -> None:
        image = self._images[identity]
        while not self._free or image.memory.nbytes > self._device.budget.free + self._spare:
            if not self._give_way():
                break
        if not self._free:
            raise OutOfMemory(f"{SLOTS} adapters of {self._model} are in use, the most at once: wait", limit=SLOTS)
        products = self._paged.install_adapters()
        self._reserve_room(self._resident_bytes + image.memory.nbytes)
        with self._device.computing():
            try:
                memory = self._device.allocate(self._label(identity), image.memory.shape, image.memory.dtype)
            except OutOfMemory as error:
                self._reserve_room(self._resident_bytes)
                told = f"{error.message}; load {self._model} with less KV memory or with adapter_memory, for adapters"
                raise OutOfMemory(told, **error.data) from error
            # The allocator may give out memory that a step before this mark still reads.
            self._device.copy(memory, image.memory, self._device.mark(), "adapter", CopyLane.UP).order()
            slot = self._free.pop()
            products.fill(slot, image.pairs(memory, products.targets))
        self._slots[identity] = slot

    def _give_way(self) -> bool:
        """Makes the longest unused adapter leave the device. → False if all are in use."""
        used = set(self._users.values())
        identity = next((each for each in self._slots if each not in used), None)
        if identity is not None:
            self._leave(identity)
        return identity is not None

    def _leave(self, identity: bytes) -> None:
        slot = self._slots.pop(identity)
        self._paged.install_adapters().clear(slot)
        self._free.append(slot)
        self._device.release(self._label(identity))
        self._reserve_room(self._resident_bytes)

    @property
    def _spare(self) -> int:
        """Bytes of the room that no adapter takes."""
        return max(self._room - self._resident_bytes, 0)

    def _reserve_room(self, taken: int) -> None:
        """Reserves what `taken` bytes of adapters leave of the room. Beyond the room, adapters take what the model
        leaves."""
        if self._room:
            with suppress(OutOfMemory):  # the thread of a load was faster: it has what an adapter has just left
                self._device.budget.change(room_label(self._model), max(self._room - taken, 0))

    def _label(self, identity: bytes) -> str:
        return f"adapter {identity.hex()} of {self._model}"

    def release(self) -> None:
        """Gives all device memory back. The model does not run afterwards."""
        for identity in [*self._slots]:
            self._leave(identity)
        if self._room:
            self._device.budget.release(room_label(self._model))
        self._images.clear()
        self._users.clear()

    def check_integrity(self) -> None:
        assert sorted([*self._free, *self._slots.values()]) == list(range(SLOTS)), (self._free, self._slots)
        assert self._slots.keys() <= self._images.keys() and set(self._users.values()) <= self._slots.keys()


def room_label(model: str) -> str:
    return f"room for adapters of {model}"
