"""Small arrays that cross between host and device in every step, past the copy engines.

A copy engine carries what goes one way in the order in which it was queued, whichever stream it belongs to: the inputs
of a step, a few kilobytes, would wait for 256 MB of pages before them, five milliseconds, and the step for them. A
kernel reads and writes pinned host memory by itself, in turn with what else is on the bus.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_NAP = 0.0002  # seconds between two calls of `meanwhile`
_LOOKS_AWAY = 0.8  # of the time that the last read took: behind that the event alone is waited for, and seen at once


def send(target: Tensor, source: Tensor) -> None:
    """To the device, queued on the current stream. `source`: from Device.staging, and as it is until the device has
    taken it: torch does not know of it, and gives the memory of one that is dropped to somebody else. Both are
    contiguous and of whole 64 bits."""
    if not target.is_cuda:
        target.copy_(source)
    elif target.numel():
        from djinnd.model.kernels.cross import cross  # needs Triton, which comes with CUDA builds of torch

        cross(source, target)


def send_counted(target: Tensor, source: Tensor) -> None:
    """As `send`, of as many 64 bits as the first ones of the source count, themselves included. A graph that has
    captured this sends, whenever it is replayed, what is there then, and as much as is counted then."""
    if target.is_cuda:
        from djinnd.model.kernels.cross import cross_counted

        cross_counted(source, target)
    else:
        words = int(source[:8].view(torch.int64))
        target[: 8 * words].copy_(source[: 8 * words])


class Inbox:
    """Where the host reads what a step has come to. Used by one thread, for one array at a time."""

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.int64)
        self._numbers = self._staging.numpy()  # the same memory, which torch takes longer to read
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0  # that the last read has waited

    def read(self, values: Tensor, meanwhile: Callable[[], bool]) -> list[int]:
        """int64 [n], on the device. Waits for it, and for what the current stream has to do before. Calls `meanwhile`
        first, and again and again while that says so, though hardly when it would hold up who waits."""
        if not (values.is_cuda and values.numel()):
            meanwhile()
            return list[int](values.tolist())
        from djinnd.model.kernels.cross import cross

        count = values.numel()
        if self._event is None or count > self._staging.numel():
            self._staging = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=True)
            self._numbers = self._staging.numpy()
            self._event = torch.cuda.Event()
        cross(values.contiguous(), self._staging[:count])
        self._event.record()
        began = time.perf_counter()
        until = began + self._seconds * _LOOKS_AWAY
        while meanwhile() and time.perf_counter() < until and not self._event.query():
            time.sleep(_NAP)
        self._event.synchronize()
        self._seconds = time.perf_counter() - began
        tokens: list[int] = self._numbers[:count].tolist()
        return tokens
