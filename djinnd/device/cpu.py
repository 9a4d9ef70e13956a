"""A CPU that plays the device: its pool is ordinary memory under the budget, its copy engine a thread."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from djinnd.device.budget import MemoryBudget
from djinnd.device.device import Device

_DEFAULT_SHARE = 0.5  # of the memory that is available when the engine starts


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

    def order(self) -> None:
        self.wait()  # the compute "stream" is the calling thread itself


class CpuDevice(Device):
    def __init__(self, memory: int) -> None:
        self.torch_device = torch.device("cpu")
        self.description = f"CPU, {torch.get_num_threads()} threads"
        self.budget = MemoryBudget(memory or int(_available_memory() * _DEFAULT_SHARE))
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor, _CopyEvent] | None] = queue.SimpleQueue()
        self._engine = threading.Thread(target=self._copy_loop, name="djinn-copy", daemon=True)
        self._engine.start()

    @torch.inference_mode()  # tensors that were made in it let nobody else write to them
    def _copy_loop(self) -> None:
        while (job := self._queue.get()) is not None:
            target, source, event = job
            try:
                target.copy_(source)
            except BaseException as error:  # told to whoever waits for the copy
                event.finish(error)
            else:
                event.finish()

    def trim(self) -> None:
        pass  # the C library's allocator knows no streams

    def copy(self, target: Tensor, source: Tensor) -> _CopyEvent:
        event = _CopyEvent()
        self._queue.put((target, source, event))
        return event

    def pin(self, pieces: Sequence[Tensor]) -> None:
        pass  # every host page is as near as any other

    def unpin(self, pieces: Sequence[Tensor]) -> None:
        pass

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.copy(torch.empty(0), torch.empty(0)).wait()

    def close(self) -> None:
        self._queue.put(None)
        self._engine.join()


def _available_memory() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
