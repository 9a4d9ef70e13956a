"""The CPU as a device: its pool is ordinary memory under the budget, and a thread does its copies."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from djinn_client.transport.host_memory import anonymous_bytes, tightest
from djinnd.core.rates import Rates
from djinnd.device.budget import MemoryBudget
from djinnd.device.device import CopyLane, Device, StreamMark
from djinnd.device.measuring import measured_rates
from djinnd.device.tuning import CPU_RATE_BYTES, CPU_RATE_RUNS, CPU_RATE_SIDE, CPU_SHARE

log = logging.getLogger("djinnd.device")


class _CopyEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def has_passed(self) -> bool:
        if not self._done.is_set():
            return False
        self.wait()
        return True

    def order(self) -> None:
        self.wait()  # the calling thread is the compute "stream"


class _Passed:
    """A mark. The calling thread is the compute "stream", so it has passed the mark already."""


class _Pinned:
    """Host memory needs no pinning on this device."""

    def wait(self, index: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Stamp:
    def __init__(self) -> None:
        self._at = 0.0  # seconds of the host's clock; 0: not passed yet

    def pass_now(self) -> None:
        self._at = time.perf_counter()

    @property
    def passed(self) -> bool:
        return self._at > 0

    def since(self, earlier: _Stamp) -> float:
        return (self._at - earlier._at) * 1e6


@dataclass(slots=True)
class _Copy:
    target: Tensor
    source: Tensor
    event: _CopyEvent
    stamps: tuple[_Stamp, _Stamp]  # of its begin and its end

    def finish(self, error: BaseException | None = None) -> None:
        self.stamps[1].pass_now()
        self.event.finish(error)


class CpuDevice(Device):
    """The calling thread is the compute stream; all lanes share one thread that copies in order."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.description = f"CPU, {torch.get_num_threads()} threads"
        self.budget = MemoryBudget(memory or _default_budget())
        self._touched_at_start = anonymous_bytes()
        _warn_of_overcommitment(memory)
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        begun = threading.Event()
        self._engine = threading.Thread(target=self._copy_loop, args=(begun,), name="djinn-copy", daemon=True)
        self._engine.start()
        begun.wait()  # threads that start meanwhile would compute alone, too

    @torch.inference_mode()  # a tensor made in inference mode can only be written in inference mode
    def _copy_loop(self, begun: threading.Event) -> None:
        _compute_alone()
        begun.set()
        while (job := self._queue.get()) is not None:
            job.stamps[0].pass_now()
            try:
                job.target.copy_(job.source)
            except BaseException as error:  # `wait` raises it
                job.finish(error)
            else:
                job.finish()

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Maps anonymous memory, which the kernel zeroes page by page at first touch. A pool costs the pages in use,
        and no time up front."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        memory = mmap.mmap(-1, nbytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype).view(shape)

    @property
    def untouched_host_bytes(self) -> int:
        touched = anonymous_bytes() - self._touched_at_start
        return max(self.budget.used - max(touched, 0), 0)

    def trim(self) -> None:
        pass  # the C library's allocator has no streams

    def _queue_copy(
        self, target: Tensor, source: Tensor, after: StreamMark | None, lane: CopyLane, is_traced: bool
    ) -> tuple[_CopyEvent, Sequence[_Stamp]]:
        event, stamps = _CopyEvent(), (_Stamp(), _Stamp())
        self._queue.put(_Copy(target, source, event, stamps))
        return event, stamps

    def mark(self) -> _Passed:
        self.catch_up()
        return _Passed()

    def stamp(self) -> _Stamp:
        stamp = _Stamp()
        stamp.pass_now()
        return stamp

    def _measure(self) -> Rates:
        return _measured_rates()

    def resize(self, budget: int) -> None:
        self.budget.resize(budget)

    def begin_to_pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> _Pinned:
        return _Pinned()

    def unpin(self, pieces: Sequence[Tensor]) -> None:
        pass

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.copy(torch.empty(0), torch.empty(0)).wait()

    def close(self) -> None:
        self._queue.put(None)
        self._engine.join()


def _compute_alone() -> None:
    """From now on, the calling thread's operations use no other threads. Other threads' use as many as before.

    OpenMP keeps a pool of threads for each thread that has ever used some. GNU's lets the threads of all pools spin
    between two operations only while they are no more than the cores. A second pool made a decode step on two cores
    sleep and wake 330 times.
    """
    others = torch.get_num_threads()  # torch gives a thread its number at the first use, and would undo the next line
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))  # it is also the number of new threads
    restoring.start()
    restoring.join()


@cache  # the machine's rates do not change while the process runs
def _measured_rates() -> Rates:
    host = torch.zeros(CPU_RATE_BYTES, dtype=torch.uint8)
    return measured_rates(torch.device("cpu"), host, CPU_RATE_SIDE, CPU_RATE_RUNS, _seconds)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _default_budget() -> int:
    bound = tightest()
    free = bound.left if bound else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(int(free * CPU_SHARE), 1)


def _warn_of_overcommitment(memory: int) -> None:
    """A configured budget stays as it is, because other processes may free memory later."""
    bound = tightest()
    if bound is not None and memory > bound.left:
        log.warning("memory_overcommitted budget=%d available=%d bound=%s", memory, bound.left, bound.name)
