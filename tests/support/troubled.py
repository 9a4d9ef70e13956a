"""A CPU device with a troubled bus: copies are late, wait at a gate, or fail."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from djinnd.device.cpu import CpuDevice
from djinnd.device.device import Event, StreamMark

FOREVER = 60.0  # seconds


class _Watched(Tensor):
    """The source of a copy, which asks the device first."""

    device_: TroubledDevice

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            target, source = args
            source.device_.meet(target, source)
            return func(target, source.as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class TroubledDevice(CpuDevice):
    """Has no trouble by default. `largest`: bytes of the largest copy from the host so far."""

    def __init__(self, memory: int) -> None:
        self.delay = 0.0  # seconds for each copy
        self.largest = 0
        self.gate = threading.Event()
        self.gate.set()
        self._failing: list[tuple[int, int]] = []
        self.failed = 0
        self.fail_any = 0  # number of copies to fail, from any source
        super().__init__(memory)

    def copy(self, target: Tensor, source: Tensor, after: StreamMark | None = None, name: str = "copy") -> Event:
        with torch.inference_mode():
            watched = source.as_subclass(_Watched)
        watched.device_ = self
        return super().copy(target, watched, after, name)

    def meet(self, target: Tensor, source: Tensor) -> None:
        """Runs on the thread that copies. The target of a late copy is full of NaN until the copy is done."""
        self.largest = max(self.largest, source.numel() * source.element_size())
        if self.delay or not self.gate.is_set():
            target.view(torch.uint8).fill_(0xFF)
        assert self.gate.wait(FOREVER)
        if self.delay:
            time.sleep(self.delay)
        if self.fail_any:
            self.fail_any -= 1
            raise OSError("the bus has caught fire")
        start = source.data_ptr()
        for number, (first, end) in enumerate(self._failing):
            if first <= start < end:
                del self._failing[number]
                self.failed += 1
                raise OSError("the bus has caught fire")

    def fail(self, source: Tensor) -> None:
        """The next copy from this host memory fails, once."""
        self._failing.append((source.data_ptr(), source.data_ptr() + source.numel() * source.element_size()))

    def let_go(self) -> None:
        self.gate.set()
