"""One CUDA device: a compute stream, a copy stream, and a hard budget that torch's allocator enforces too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinnd.device.budget import MemoryBudget, gib
from djinnd.device.device import Device

_DEFAULT_SHARE = 0.9  # of the memory that is free when the engine starts
_LIBRARIES = 512 << 20  # what cuBLAS, Triton's modules and captured graphs take beside torch's allocator
_PIN_THREADS = 16  # registering 16 GiB in pieces side by side takes 0.6 s, in one call 5.4 s


class _CopyEvent:
    def __init__(self, event: torch.cuda.Event, compute: torch.cuda.Stream) -> None:
        self._event = event
        self._compute = compute

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        self._compute.wait_event(self._event)


class CudaDevice(Device):
    def __init__(self, name: str, memory: int) -> None:
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
                f"a budget of {gib(memory)} is more than the {gib(free)} that {name} has free (of {gib(total)})",
                needed=memory,
                free=free,
            )
        self.budget = MemoryBudget(memory or int(free * _DEFAULT_SHARE))
        torch.zeros(1, device=self.torch_device)  # makes the context
        context = free - torch.cuda.mem_get_info(index)[0]
        self.budget.reserve("the CUDA context and its libraries", max(context, 0) + _LIBRARIES)
        torch.cuda.set_per_process_memory_fraction((self.budget.total - context) / total, index)
        self.compute_stream = torch.cuda.Stream(index)
        self.copy_stream = torch.cuda.Stream(index)

    @staticmethod
    def available() -> bool:
        return torch.cuda.is_available()

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def copy(self, target: Tensor, source: Tensor) -> _CopyEvent:
        event = torch.cuda.Event()
        with torch.cuda.stream(self.copy_stream):
            if target.dtype == source.dtype:
                target.copy_(source, non_blocking=True)
            else:  # travels as it is; the side that has the time converts: the device
                target.copy_(source.to(target.device, non_blocking=True), non_blocking=True)
            event.record(self.copy_stream)
        return _CopyEvent(event, self.compute_stream)

    def pin(self, pieces: Sequence[Tensor]) -> None:
        with ThreadPoolExecutor(_PIN_THREADS, "djinn-pin") as pool:
            jobs = [pool.submit(self._pin_piece, piece) for piece in pieces]
        errors = [job.exception() for job in jobs]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            self.unpin([piece for piece, error in zip(pieces, errors, strict=True) if error is None])
            nbytes = sum(piece.numel() for piece in pieces)
            raise OutOfMemory(
                f"{gib(nbytes)} of host memory cannot be pinned: {failed}; see the memlock limit (`djinnctl doctor`)",
                needed=nbytes,
            ) from failed

    def _pin_piece(self, piece: Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))

    def unpin(self, pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(piece.data_ptr()))

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self.compute_stream):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
