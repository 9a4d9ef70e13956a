"""Small arrays that cross between host and device in every step, past the copy engines.

A copy engine carries what goes one way in the order in which it was queued, whichever stream it belongs to: the inputs
of a step, a few kilobytes, would wait for 256 MB of pages before them, five milliseconds, and the step for them. A
kernel reads and writes pinned host memory by itself, in turn with what else is on the bus.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def send(target: Tensor, source: Tensor) -> None:
    """To the device, queued on the current stream. `source`: from Device.staging, and as it is until the device has
    taken it: torch does not know of it, and gives the memory of one that is dropped to somebody else. Both are
    contiguous and of whole 64 bits."""
    if not target.is_cuda:
        target.copy_(source)
    elif target.numel():
        from djinnd.model.kernels.cross import cross  # needs Triton, which comes with CUDA builds of torch

        cross(source, target)


class Inbox:
    """Where the host reads what a step has come to. Used by one thread, for one array at a time."""

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.int64)
        self._event: torch.cuda.Event | None = None

    def read(self, values: Tensor, meanwhile: Callable[[], object]) -> list[int]:
        """int64 [n], on the device. Waits for it, and for what the current stream has to do before; calls `meanwhile`
        first."""
        if not (values.is_cuda and values.numel()):
            meanwhile()
            return list[int](values.tolist())
        from djinnd.model.kernels.cross import cross

        count = values.numel()
        if self._event is None or count > self._staging.numel():
            self._staging = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()
        cross(values.contiguous(), self._staging[:count])
        self._event.record()
        meanwhile()
        self._event.synchronize()
        return list[int](self._staging[:count].tolist())
