"""Copies small arrays between host and device in every step, by a kernel instead of a copy engine.

A copy engine carries the copies of one direction in the order queued, whatever their streams. A step's inputs, a few
kilobytes, could wait 5 ms behind 256 MB of pages, and the step with them. A kernel reads and writes pinned host memory
itself, and shares the bus with the copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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


def receive(target: Tensor, source: Tensor) -> None:
    """Queues a copy to `target`, host memory from Device.staging, on the current stream. Like `send` otherwise."""
    if not source.is_cuda:
        target.copy_(source)
    elif source.numel():
        from djinnd.model.kernels.host_memory.pinned_copy import copy

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


class _Staging:
    """Pinned host memory of at least `count` numbers, and an event behind the copy into it."""

    def __init__(self, count: int) -> None:
        self.memory = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=True)
        self.numbers = self.memory.numpy()  # the same memory: numpy's `tolist` is faster than torch's
        self.event = torch.cuda.Event()


@dataclass(frozen=True, slots=True)
class Asked:
    """An array that `ResultReader.ask` has queued a copy of."""

    values: Tensor
    staging: _Staging | None  # None: `values` is on the host


class ResultReader:
    """Reads the results of steps on the host. Used by one thread. Two arrays may be asked for at a time; they are read
    in the same order."""

    def __init__(self) -> None:
        self._stagings: list[_Staging | None] = [None, None]
        self._seconds = 0.0  # duration of the last read

    def ask(self, values: Tensor) -> Asked:
        """Queues a copy of `values`, int64 [n] on the device, on the current stream."""
        count = values.numel()
        if not (values.is_cuda and count):
            return Asked(values, None)
        from djinnd.model.kernels.host_memory.pinned_copy import copy

        self._stagings.reverse()
        staging = self._stagings[0]
        if staging is None or count > staging.memory.numel():
            staging = self._stagings[0] = _Staging(count)
        copy(values.contiguous(), staging.memory[:count])
        staging.event.record()
        return Asked(values, staging)

    def read(self, asked: Asked, meanwhile: Callable[[], bool] = lambda: False) -> list[int]:
        """Waits for the copy, and returns the values.

        Calls `meanwhile` at least once, and again as long as it returns True and the result is not expected soon.
        """
        staging = asked.staging
        if staging is None:
            meanwhile()
            return list[int](asked.values.tolist())
        began = time.perf_counter()
        until = began + self._seconds * IDLE_SHARE
        while meanwhile() and time.perf_counter() < until and not staging.event.query():
            time.sleep(NAP_S)
        staging.event.synchronize()
        self._seconds = time.perf_counter() - began
        tokens: list[int] = staging.numbers[: asked.values.numel()].tolist()
        return tokens
