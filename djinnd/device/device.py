"""What the layers above may ask of a device."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from djinnd.device.budget import MemoryBudget
from djinnd.device.trace import Stamp, Trace


class Event(Protocol):
    """A point in the queue of copies."""

    def wait(self) -> None:
        """The host waits until the copy has happened. Raises what went wrong with it."""

    def order(self) -> None:
        """Work that is queued on the compute stream from now on runs after the copy; the host does not wait. Raises
        what is known by now to have gone wrong with the copy."""

    def has_passed(self) -> bool:
        """Whether the copy has happened; the host does not wait. Raises what went wrong with it."""


class Lane(Enum):
    """Copies of one lane happen in the order queued; those of others meanwhile. By the track of their spans."""

    WEIGHTS = "copy"
    UP = "pages up"  # to the device
    DOWN = "pages down"  # to the host: both ways at once, the bus carries nearly twice as much


class Mark(Protocol):
    """A point in the compute stream, for copies to wait for. The device that made it knows what it is."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does in a second, measured on it."""

    bus: float  # bytes, pinned host memory to device
    memory: float  # bytes, read and written
    products: float  # floating-point operations of a large bfloat16 matrix product


class Pinning(Protocol):
    """Pieces of host memory that are being pinned, in their order and several at a time."""

    def wait(self, index: int) -> None:
        """Until this piece is pinned, or has failed to be: then `finish` says why."""

    def finish(self) -> None:
        """Until all are. Raises OutOfMemory where the host lets no more be pinned, and then none of them is; again
        when it is called again."""


class Device(ABC):
    """Owns the memory budget and the copy queues of one device. Used by the engine's thread; `copy` by any thread."""

    torch_device: torch.device
    description: str
    budget: MemoryBudget
    reserved = 0  # bytes of the budget that are the device's own: its context and libraries
    trace: Trace | None = None  # where the step that is being run is recorded

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing = 0  # threads
        self._computed_at = -math.inf
        self._expected: list[Event] = []

    @property
    def name(self) -> str:
        return str(self.torch_device)

    def allocate(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        """Device memory under the budget, until `release(label)`. Raises OutOfMemory with the figures."""
        self.budget.reserve(label, torch.Size(shape).numel() * dtype.itemsize)
        try:
            if not zero:
                return torch.empty(shape, dtype=dtype, device=self.torch_device)
            return self._zeros(shape, dtype)
        except BaseException:
            self.budget.release(label)
            raise

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        zeros = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        self.synchronize()  # whichever stream reads them first
        return zeros

    def release(self, label: str) -> None:
        """Gives a label's bytes back to the budget. The owner has dropped its tensors before."""
        self.budget.release(label)

    @property
    def untouched_host_bytes(self) -> int:
        """Host memory that the device has reserved and not touched yet: the kernel still counts it as available."""
        return 0

    @abstractmethod
    def trim(self) -> None:
        """Hands memory that nobody holds any more back to the driver: whatever stream it was used on, any may then
        have it."""

    @abstractmethod
    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: Mark | None = None,
        name: str = "copy",
        lane: Lane = Lane.WEIGHTS,
    ) -> Event:
        """Queues a copy between host and device memory; dtypes may differ. Copies of a lane happen in the order queued,
        this one not before the compute stream has passed `after`. `name`: of its span in a trace."""

    def expect(self, event: Event) -> None:
        """Of a copy without which some work may begin: whatever is queued on the compute stream next runs after it, but
        for the work of who is `computing` late. Marks come after it, too."""
        with self._lock:
            self._expected.append(event)

    def catch_up(self) -> None:
        """Work that is queued on the compute stream from now on runs after all copies that are expected. Raises what is
        known by now to have gone wrong with them."""
        if self._expected:
            with self._lock:
                expected, self._expected = self._expected, []
            for event in expected:
                event.order()

    @property
    def is_behind(self) -> bool:
        """Whether there is something to catch up with."""
        return bool(self._expected)

    @abstractmethod
    def mark(self) -> Mark:
        """Where the compute stream is now: after all work that has been queued on it."""

    @abstractmethod
    def stamp(self) -> Stamp:
        """Where the compute stream is now, for a trace."""

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """What is queued on the compute stream meanwhile is a span of the trace, where one is recorded."""
        trace = self.trace
        if trace is not None:
            trace.begin(track, name, **args)
        yield
        if trace is not None:
            trace.end(track)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The thread's work goes to a stream of its own, in nobody's way; it has happened when the context ends."""
        yield

    @abstractmethod
    def rates(self) -> Rates:
        """Measured at the first call, which takes a fraction of a second and some memory beside the budget's."""

    @abstractmethod
    def resize(self, budget: int) -> None:
        """Changes the budget, whose reservations fit the new one. Raises OutOfMemory when the device lacks it."""

    def pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> None:
        """Registers mapped host memory so that copies run at the speed of the bus. A piece is uint8, starts on a host
        page, and no copy reaches from one into another: the driver refuses that. `read_only`: it is mapped so.

        Raises OutOfMemory where the host lets no more be pinned, and then none of the pieces is."""
        self.begin_to_pin(pieces, read_only=read_only).finish()

    @abstractmethod
    def begin_to_pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> Pinning:
        """The same, for who has something to do meanwhile, and then calls `finish`."""

    @abstractmethod
    def unpin(self, pieces: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def staging(self, nbytes: int) -> Tensor:
        """A host buffer (uint8) from which a copy to the device does not block."""

    @contextmanager
    def computing(self, *, late: bool = False) -> Iterator[None]:
        """The thread's work goes to the compute stream. `late`: it catches up itself before it needs what is
        expected."""
        if not late:
            self.catch_up()
        with self._lock:
            self._computing += 1
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1
                self._computed_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since a thread has last been `computing`; 0 while one is."""
        with self._lock:
            return 0.0 if self._computing else time.monotonic() - self._computed_at

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
