"""A tensor of rows on the device, allocated to its users in contiguous stretches.

              0        3            9       12
    tensor    │ ▓▓▓▓▓▓ │            │ ▓▓▓▓▓ │     [capacity, width]; between 3 and 9 free

The tensor begins with the rows that the owner keeps at hand. If no free stretch is long enough, all rows move into a
larger tensor, and for a moment the budget counts both. When every stretch has been given back, the larger tensor is
freed.
"""

from __future__ import annotations

from bisect import insort

import torch

from djinn_client.errors import OutOfMemory
from djinnd.device import Device
from djinnd.engine.tuning import GROWTH_BYTES


class DeviceRows:
    """Used by the engine's thread. `label`: in the device's budget, for a tensor that has grown. The owner has reserved
    the memory of the rows at hand. Taking a row at hand between two steps costs a tenth of an allocation."""

    def __init__(self, device: Device, label: str, width: int, dtype: torch.dtype, at_hand: int = 0) -> None:
        self._device = device
        self._label = label
        self._width = width
        self._dtype = dtype
        with device.computing():
            self._at_hand = torch.empty((at_hand, width), dtype=dtype, device=device.torch_device)
        self._reset()

    def _reset(self) -> None:
        self.tensor = self._at_hand
        # (first row, number of rows), ascending, never adjacent
        self._free = [(0, self.capacity)] if self.capacity else []

    @property
    def capacity(self) -> int:
        return len(self.tensor)

    @property
    def row_bytes(self) -> int:
        return self._width * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that the budget has under the label."""
        return self.capacity * self.row_bytes if self._has_grown else 0

    @property
    def _has_grown(self) -> bool:
        return self.tensor is not self._at_hand

    def take(self, count: int) -> int:
        """→ the first of `count` contiguous rows, with undefined contents. Raises OutOfMemory with the figures; nothing
        has changed then."""
        assert count > 0
        found = next((place for place in self._free if place[1] >= count), None)
        if found is None:
            self._grow(count)
            found = self._free[-1]
        self._free.remove(found)
        first, free = found
        if free > count:
            insort(self._free, (first + count, free - count))
        return first

    def give_back(self, first: int, count: int) -> None:
        """Frees rows that the device may still use: all use is queued on the compute stream or ordered with it, so it
        precedes the next user's."""
        after = next((place for place in self._free if place[0] == first + count), None)
        before = next((place for place in self._free if sum(place) == first), None)
        for place in (before, after):
            if place is not None:
                self._free.remove(place)
                first, count = min(first, place[0]), count + place[1]
        insort(self._free, (first, count))
        if count == self.capacity:
            self._shrink()

    def _grow(self, count: int) -> None:
        old, end = self.tensor, self.capacity
        last = self._free[-1] if self._free and sum(self._free[-1]) == end else (end, 0)
        least, most = last[0] + count, max(end, 1) + min(end, GROWTH_BYTES // self.row_bytes)
        has_room = max(least, most) * self.row_bytes <= self._device.budget.free
        capacity = max(least, most) if has_room else least
        grows_again = self._has_grown
        label = f"more {self._label}" if grows_again else self._label
        with self._device.computing():
            try:
                tensor = self._device.allocate(label, (capacity, self._width), self._dtype)
            except OutOfMemory as error:
                told = f"{error.message}, ask for fewer positions or points, or wait until other requests have ended"
                raise OutOfMemory(told, **error.data) from error
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(f"{label}: {error}") from error
            if end:
                tensor[:end].copy_(old)
        self.tensor = tensor
        if grows_again:
            self._device.release(self._label)
            self._device.budget.rename(label, self._label)
        if last[1]:
            self._free.remove(last)
        insort(self._free, (last[0], capacity - last[0]))

    def _shrink(self) -> None:
        if self._has_grown:
            self._reset()
            self._device.release(self._label)

    def release(self) -> None:
        """Frees everything, also rows in use and the rows at hand."""
        self._shrink()
        self._at_hand = self._at_hand[:0].clone()
        self._reset()

    def check_integrity(self) -> None:
        ends = [edge for first, count in self._free for edge in (first, first + count)]
        assert ends == sorted(ends) and all(count > 0 for _, count in self._free), self._free
        assert all(end < first for (end, first) in zip(ends[1::2], ends[2::2], strict=False)), "not joined"
        assert not ends or ends[-1] <= self.capacity, (self._free, self.capacity)
