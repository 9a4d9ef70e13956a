"""Accounts for device memory. The budget only counts bytes; the owner of a reservation owns the memory."""

from __future__ import annotations

import math

from djinn_client.errors import OutOfMemory


class MemoryBudget:
    """A hard budget in bytes, divided into labelled reservations. Invariant: their sum never exceeds the budget."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._reserved: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self._reserved.values())

    @property
    def free(self) -> int:
        return self.total - self.used

    def reserve(self, label: str, nbytes: int) -> None:
        """Raises OutOfMemory with the figures, and reserves nothing, if less than `nbytes` is free."""
        assert nbytes >= 0 and label not in self._reserved, label
        if nbytes > self.free:
            raise OutOfMemory(
                f"{label} needs {gib(nbytes)} of device memory; {gib(self.free)} of the budget of {gib(self.total)} "
                "is free: unload a model or raise --memory",
                needed=nbytes,
                free=self.free,
                budget=self.total,
            )
        self._reserved[label] = nbytes

    def release(self, label: str) -> None:
        del self._reserved[label]

    def change(self, label: str, nbytes: int) -> None:
        """Gives a reservation another size. Raises OutOfMemory as `reserve`, and changes nothing then."""
        before = self._reserved.pop(label)
        try:
            self.reserve(label, nbytes)
        except OutOfMemory:
            self._reserved[label] = before
            raise

    def rename(self, label: str, new: str) -> None:
        assert new not in self._reserved, new
        self._reserved[new] = self._reserved.pop(label)

    def resize(self, total: int) -> None:
        """Raises OutOfMemory with the figures if more than `total` is reserved."""
        if total < self.used:
            raise OutOfMemory(
                f"a budget of {gib(total)} is less than the {gib(self.used)} that are in use",
                needed=self.used,
                budget=total,
            )
        self.total = total

    def check_integrity(self) -> None:
        assert all(n >= 0 for n in self._reserved.values()), self._reserved
        assert self.used <= self.total, (self.used, self.total)


def gib(nbytes: int) -> str:
    """Formats bytes as MiB or GiB."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / (1 << 20):.1f} MiB"


def at_least(nbytes: int) -> str:
    """Formats bytes as MiB or GiB, rounded up: for a figure that a user is told to provide."""
    if nbytes > (1 << 30) - (1 << 20):
        return f"{math.ceil(nbytes * 100 / (1 << 30)) / 100:.2f} GiB"
    return f"{math.ceil(nbytes * 10 / (1 << 20)) / 10:.1f} MiB"
