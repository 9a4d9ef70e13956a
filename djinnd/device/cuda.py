"""A CUDA device: a compute stream, copy streams, and a hard budget that torch's allocator enforces too."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinnd.core.rates import Rates
from djinnd.device import tuning
from djinnd.device.budget import MemoryBudget, gib
from djinnd.device.device import CopyLane, Device, StreamMark
from djinnd.device.measuring import measured_rates

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly

_libc = ctypes.CDLL(None)


class _CopyEvent:
    def __init__(self, event: torch.cuda.Event, compute: torch.cuda.Stream) -> None:
        self._event = event
        self._compute = compute

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        self._compute.wait_event(self._event)

    def has_passed(self) -> bool:
        return bool(self._event.query())


class _Stamp:
    def __init__(self, event: torch.cuda.Event) -> None:
        """`event` has been recorded with timing enabled."""
        self._event = event

    @property
    def passed(self) -> bool:
        return bool(self._event.query())

    def since(self, earlier: _Stamp) -> float:
        return float(earlier._event.elapsed_time(self._event)) * 1e3


class _Pinning:
    def __init__(self, device: CudaDevice, pieces: Sequence[Tensor], jobs: list[Future[None]]) -> None:
        self._device = device
        self._pieces = pieces
        self._nbytes = sum(piece.numel() for piece in pieces)
        self._jobs = jobs

    def wait(self, index: int) -> None:
        self._jobs[index].exception()

    def finish(self) -> None:
        errors = [job.exception() for job in self._jobs]
        failed = next((error for error in errors if error is not None), None)
        if failed is None:
            return
        self._device.unpin([piece for piece, error in zip(self._pieces, errors, strict=False) if error is None])
        nbytes, self._pieces = self._nbytes, []
        raise OutOfMemory(
            f"{gib(nbytes)} of host memory cannot be pinned: {failed}; see the memlock limit (`djinnctl doctor`)",
            needed=nbytes,
        ) from failed


class CudaDevice(Device):
    """One GPU. Owns the compute stream and a stream for each lane."""

    def __init__(self, name: str, memory: int) -> None:
        super().__init__()
        if not self.available():
            raise InvalidRequest(f"device {name} is not there: torch sees no CUDA device; `djinnctl doctor` says why")
        self.torch_device = torch.device(name)
        index = self.torch_device.index or 0
        if index >= torch.cuda.device_count():
            raise InvalidRequest(f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self.description = torch.cuda.get_device_name(index)
        free, total = torch.cuda.mem_get_info(index)
        if memory > free:
            raise OutOfMemory(
                f"a budget of {gib(memory)} is more than the {gib(free)} that {name} has free (of {gib(total)}): "
                "lower --memory, or stop other programs on the device",
                needed=memory,
                free=free,
            )
        self.budget = MemoryBudget(memory or int(free * tuning.CUDA_SHARE))
        torch.zeros(1, device=self.torch_device)  # creates the context
        context = free - torch.cuda.mem_get_info(index)[0]
        self.reserved = max(context, 0) + tuning.CONTEXT_BYTES
        self.budget.reserve("the CUDA context and its libraries", self.reserved)
        self._limit_allocator(total)
        self.compute_stream = torch.cuda.Stream(index)
        self.copy_stream = torch.cuda.Stream(index)
        self._lanes = {
            CopyLane.WEIGHTS: self.copy_stream,
            CopyLane.UP: torch.cuda.Stream(index),
            CopyLane.DOWN: torch.cuda.Stream(index),
        }
        self._aside = torch.cuda.Stream(index)

    @staticmethod
    def available() -> bool:
        return torch.cuda.is_available()

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def _queue_copy(
        self, target: Tensor, source: Tensor, after: StreamMark | None, lane: CopyLane, is_traced: bool
    ) -> tuple[_CopyEvent, Sequence[_Stamp]]:
        stamps, stream = list[_Stamp](), self._lanes[lane]
        event = torch.cuda.Event(enable_timing=is_traced)
        with torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                stream.wait_event(after)
            if is_traced:
                stamps = [self._stamp_on(stream), _Stamp(event)]
            if target.dtype == source.dtype:
                target.copy_(source, non_blocking=True)
            else:  # send the source's dtype over the bus; the device converts
                target.copy_(source.to(target.device, non_blocking=True), non_blocking=True)
            event.record(stream)
        return _CopyEvent(event, self.compute_stream), stamps

    def mark(self) -> torch.cuda.Event:
        self.catch_up()
        event = torch.cuda.Event()
        event.record(self.compute_stream)
        return event

    def stamp(self) -> _Stamp:
        return self._stamp_on(self.compute_stream)

    def _stamp_on(self, stream: torch.cuda.Stream) -> _Stamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return _Stamp(event)

    def _measure(self) -> Rates:
        host = self.staging(tuning.CUDA_RATE_BYTES)
        with self.side_stream():
            rates = measured_rates(self.torch_device, host, tuning.CUDA_RATE_SIDE, tuning.CUDA_RATE_RUNS, _seconds)
        self.trim()
        return rates

    def resize(self, budget: int) -> None:
        self.trim()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        more = budget - self.budget.total
        if more > free:
            raise OutOfMemory(
                f"a budget of {gib(budget)} is {gib(more)} more than now, and {self.name} has {gib(free)} free: "
                "ask for less, or stop other programs on the device",
                needed=more,
                free=free,
            )
        self.budget.resize(budget)
        self._limit_allocator(total)

    def _limit_allocator(self, total: int) -> None:
        limit = self.budget.total - self.reserved + tuning.SLACK_BYTES
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), self.torch_device)

    def begin_to_pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> _Pinning:
        def register(piece: Tensor, parts: list[Future[None]]) -> None:
            for part in parts:
                part.result()
            flags = _REGISTER_READ_ONLY if read_only else 0
            with torch.cuda.device(self.torch_device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), flags))
            if self.idle_s < tuning.BUSY_S:
                time.sleep(tuning.LET_IN_S)

        populate = ThreadPoolExecutor(tuning.POPULATE_THREADS, "djinn-populate")
        registrar = ThreadPoolExecutor(1, "djinn-register")
        advice = _MADV_POPULATE_READ if read_only else _MADV_POPULATE_WRITE
        parts = [
            [populate.submit(_populate, part, advice) for part in piece.split(tuning.POPULATED_BYTES)]
            for piece in pieces
        ]
        pinning = _Pinning(self, pieces, [registrar.submit(register, *job) for job in zip(pieces, parts, strict=True)])
        populate.shutdown(wait=False)
        registrar.shutdown(wait=False)
        return pinning

    def unpin(self, pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(piece.data_ptr()))

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._aside):
            yield
        self._aside.synchronize()

    @contextmanager
    def computing(self, *, late: bool = False) -> Iterator[None]:
        with super().computing(late=late), torch.cuda.stream(self.compute_stream):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()


def _populate(piece: Tensor, advice: int) -> None:
    """Fills the page tables of mapped memory. Kernels before 5.14 refuse the advice; then the registration fills them,
    which only takes longer."""
    for part in piece.split(tuning.POPULATED_AT_ONCE):
        _libc.madvise(ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.numel()), advice)


def _seconds(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
