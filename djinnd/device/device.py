"""What the layers above may ask of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from djinnd.device.budget import MemoryBudget


class Event(Protocol):
    """A point in the queue of copies."""

    def wait(self) -> None:
        """The host waits until the copy has happened."""

    def order(self) -> None:
        """Work that is queued on the compute stream from now on runs after the copy; the host does not wait."""


class Device(ABC):
    """Owns the memory budget and the copy queue of one device. Used by the engine's thread; `copy` by any thread."""

    torch_device: torch.device
    description: str
    budget: MemoryBudget

    @property
    def name(self) -> str:
        return str(self.torch_device)

    def allocate(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        """Device memory under the budget, until `release(label)`. Raises OutOfMemory with the figures."""
        self.budget.reserve(label, torch.Size(shape).numel() * dtype.itemsize)
        try:
            if not zero:
                return torch.empty(shape, dtype=dtype, device=self.torch_device)
            zeros = torch.zeros(shape, dtype=dtype, device=self.torch_device)
            self.synchronize()  # whichever stream reads them first
            return zeros
        except BaseException:
            self.budget.release(label)
            raise

    def release(self, label: str) -> None:
        """Gives a label's bytes back to the budget. The owner has dropped its tensors before."""
        self.budget.release(label)

    @abstractmethod
    def trim(self) -> None:
        """Hands memory that nobody holds any more back to the driver: whatever stream it was used on, any may then
        have it."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> Event:
        """Queues a copy between host and device memory; dtypes may differ. Copies happen in the order queued."""

    @abstractmethod
    def pin(self, pieces: Sequence[Tensor]) -> None:
        """Registers mapped host memory so that copies run at the speed of the bus. A piece is uint8, starts on a host
        page, and no copy reaches from one into another: the driver refuses that.

        Raises OutOfMemory where the host lets no more be pinned, and then none of the pieces is."""

    @abstractmethod
    def unpin(self, pieces: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def staging(self, nbytes: int) -> Tensor:
        """A host buffer (uint8) from which a copy to the device does not block."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The thread's work goes to the compute stream."""
        yield

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
