"""Copies small arrays between host and device in every step, by a kernel instead of a copy engine.

A copy engine carries the copies of one direction in the order queued, whatever their streams. A step's inputs, a few
kilobytes, could wait 5 ms behind 256 MB of pages, and the step with them. A kernel reads and writes pinned host memory
itself, and shares the bus with the copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from djinnd.model.tuning import IDLE_SHARE, NAP_S


def send(target: Tensor, source: Tensor) -> None:
    """Queues a copy to the device on the current stream. Both tensors are contiguous, their bytes a multiple of 8.

    source: host memory from Device.staging. The caller keeps it alive and unchanged until the device has read it. Torch
        does not track this copy, and reuses the memory of a tensor that is dropped.
    """
    if not target.is_cuda:
        target.copy_(source)
    elif target.numel():
        from djinnd.model.kernels.host_memory.pinned_copy import (
            copy,  # needs Triton, which comes with CUDA builds of torch
        )

        copy(source, target)


def send_counted(target: Tensor, source: Tensor) -> None:
    """Like `send`, but copies only as many 64-bit words as the first word of `source` says, including that word. A
    replay of a graph that captured this call reads the source, and the count, at the time of the replay."""
    if target.is_cuda:
        from djinnd.model.kernels.host_memory.pinned_copy import copy_counted

        copy_counted(source, target)
    else:
        words = int(source[:8].view(torch.int64))
        target[: 8 * words].copy_(source[: 8 * words])


class ResultReader:
    """Reads the results of a step on the host. Used by one thread, for one array at a time."""

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.int64)
        self._numbers = self._staging.numpy()  # the same memory: numpy's `tolist` is faster than torch's
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0  # duration of the last read

    def read(self, values: Tensor, meanwhile: Callable[[], bool]) -> list[int]:
        """Waits for the current stream, and returns `values`, int64 [n] on the device.

        Calls `meanwhile` at least once, and again as long as it returns True and the result is not expected soon.
        """
        if not (values.is_cuda and values.numel()):
            meanwhile()
            return list[int](values.tolist())
        from djinnd.model.kernels.host_memory.pinned_copy import copy

        count = values.numel()
        if self._event is None or count > self._staging.numel():
            self._staging = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=True)
            self._numbers = self._staging.numpy()
            self._event = torch.cuda.Event()
        copy(values.contiguous(), self._staging[:count])
        self._event.record()
        began = time.perf_counter()
        until = began + self._seconds * IDLE_SHARE
        while meanwhile() and time.perf_counter() < until and not self._event.query():
            time.sleep(NAP_S)
        self._event.synchronize()
        self._seconds = time.perf_counter() - began
        tokens: list[int] = self._numbers[:count].tolist()
        return tokens
