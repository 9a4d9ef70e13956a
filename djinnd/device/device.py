"""The interface of a device, as the layers above use it."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from djinnd.core.rates import Rates
from djinnd.device.budget import MemoryBudget
from djinnd.device.trace import DeviceTrace, Stamp


class Event(Protocol):
    """A point in a copy queue."""

    def wait(self) -> None:
        """Blocks the host until the copy is done. Raises the copy's error, if it failed."""

    def order(self) -> None:
        """Work queued on the compute stream from now on runs after the copy; the host does not block. Raises the copy's
        error, if it has failed by now."""

    def has_passed(self) -> bool:
        """True if the copy is done; the host does not block. Raises the copy's error, if it failed."""


class CopyLane(Enum):
    """A copy queue. Copies of one lane happen in the order queued and overlap with other lanes. The value names the
    lane's track in a trace."""

    WEIGHTS = "copy"
    UP = "pages up"  # host to device
    DOWN = "pages down"  # device to host: copies both ways at once move nearly twice as much over the bus


class StreamMark(Protocol):
    """A point in the compute stream that copies wait for. Only the device that made it can read it."""


class Pinning(Protocol):
    """Pieces of host memory being pinned, several at a time, in their order."""

    def wait(self, index: int) -> None:
        """Blocks until this piece is pinned or could not be; `finish` raises the error."""

    def finish(self) -> None:
        """Blocks until all pieces are pinned. Raises OutOfMemory if the host refuses to pin one; no piece is pinned
        then. A second call raises the same error again."""


class Device(ABC):
    """Owns the memory budget and the copy queues of one device. The engine's thread uses it; `copy` may be called by
    any thread."""

    torch_device: torch.device
    description: str
    budget: MemoryBudget
    reserved = 0  # bytes of the budget that the device itself takes: its context and libraries
    trace: DeviceTrace | None = None  # records the current step, if it is traced
    _rates: Rates | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing = 0  # number of threads
        self._computed_at = -math.inf
        self._expected: list[Event] = []
        self.copied = dict.fromkeys(CopyLane, 0)  # bytes that `copy` has queued in each lane

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
        self.synchronize()  # another stream may read them first
        return zeros

    def release(self, label: str) -> None:
        """Returns a label's bytes to the budget. The owner must have dropped its tensors before."""
        self.budget.release(label)

    @property
    def untouched_host_bytes(self) -> int:
        """Bytes of host memory that the device has reserved and not touched yet; the kernel still counts them as
        available."""
        return 0

    @abstractmethod
    def trim(self) -> None:
        """Returns cached memory that no tensor uses to the driver. After that, any stream may get memory that another
        stream used."""

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: StreamMark | None = None,
        name: str = "copy",
        lane: CopyLane = CopyLane.WEIGHTS,
    ) -> Event:
        """Queues a copy between host and device memory; the dtypes may differ. Copies of a lane happen in the order
        queued, and this one starts after the compute stream has passed `after`. `name`: of its span in a trace."""
        with self._lock:
            self.copied[lane] += source.nbytes
        trace = self.trace
        event, stamps = self._queue_copy(target, source, after, lane, trace is not None)
        if trace is not None:
            trace.add(lane.value, name, *stamps, bytes=source.nbytes)
        return event

    @abstractmethod
    def _queue_copy(
        self, target: Tensor, source: Tensor, after: StreamMark | None, lane: CopyLane, is_traced: bool
    ) -> tuple[Event, Sequence[Stamp]]:
        """Queues a copy. If it is traced, also returns stamps of its begin and its end."""

    def expect(self, event: Event) -> None:
        """Registers a copy that some work may begin without. Other work queued on the compute stream runs after the
        copy, and so do marks. Only a thread that is `computing(late=True)` may queue work before it calls `catch_up`.
        """
        with self._lock:
            self._expected.append(event)

    def catch_up(self) -> None:
        """Work queued on the compute stream from now on runs after all expected copies. Raises the error of a copy that
        has failed by now."""
        if self._expected:
            with self._lock:
                expected, self._expected = self._expected, []
            for event in expected:
                event.order()

    @property
    def is_behind(self) -> bool:
        """True if there are expected copies to catch up with."""
        return bool(self._expected)

    @abstractmethod
    def mark(self) -> StreamMark:
        """The current end of the compute stream: after all work queued on it."""

    @abstractmethod
    def stamp(self) -> Stamp:
        """The current end of the compute stream, with a time, for a trace."""

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Records a span of the trace, if there is one, around the work that is queued on the compute stream inside the
        context."""
        trace = self.trace
        if trace is not None:
            trace.begin(track, name, **args)
        yield
        if trace is not None:
            trace.end(track)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """The thread's work goes to a separate stream and does not delay the compute stream. It is done when the
        context ends."""
        yield

    def rates(self) -> Rates:
        """The first call measures, which takes a fraction of a second and some memory outside the budget. A load makes
        it, beside the steps of other models."""
        if self._rates is None:
            self._rates = self._measure()
        return self._rates

    @abstractmethod
    def _measure(self) -> Rates: ...

    @abstractmethod
    def resize(self, budget: int) -> None:
        """Changes the budget; the reservations must fit the new one. Raises OutOfMemory if the device has less
        memory."""

    def pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> None:
        """Registers mapped host memory, so that copies run at the speed of the bus. Each piece is uint8 and starts on a
        host page. No copy may reach from one piece into another: the driver refuses that. `read_only`: the memory is
        mapped read-only.

        Raises OutOfMemory if the host refuses to pin a piece; no piece is pinned then.
        """
        self.begin_to_pin(pieces, read_only=read_only).finish()

    @abstractmethod
    def begin_to_pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> Pinning:
        """Starts to pin and returns at once; the caller must call `finish` later."""

    @abstractmethod
    def unpin(self, pieces: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def staging(self, nbytes: int) -> Tensor:
        """A host buffer (uint8) from which a copy to the device does not block."""

    @contextmanager
    def computing(self, *, late: bool = False) -> Iterator[None]:
        """The thread's work goes to the compute stream. `late`: the caller calls `catch_up` itself before it reads what
        expected copies bring."""
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
        """Seconds since the last `computing` context ended; 0 inside one."""
        with self._lock:
            return 0.0 if self._computing else time.monotonic() - self._computed_at

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
