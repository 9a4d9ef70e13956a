"""A device on which copies of second halves are never done before they are waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import Tensor

from djinnd.device import CopyLane, StreamMark
from djinnd.device.cpu import CpuDevice, _CopyEvent
from tests.support.loaded import MEMORY
from tests.support.rates import RATES


class LateCopy(_CopyEvent):
    """Its bytes come when the compute stream or the host waits for it. Copies before it come first."""

    def __init__(self, device: LateDevice, target: Tensor, source: Tensor, before: LateCopy | None) -> None:
        super().__init__()
        self._device = device
        self._copying = target, source
        self._before = before

    def wait(self) -> None:
        if self._before is not None:
            self._before.wait()
        if not self._done.is_set():
            target, source = self._copying
            CpuDevice.copy(self._device, target, source).wait()
            self.finish()

    def order(self) -> None:
        self._device.ordered += 1
        self.wait()


class LateDevice(CpuDevice):
    """A device whose measured bus is so fast that all pages of a session come in halves."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self._rates = replace(RATES, bus=1e15)
        self.ordered = 0  # copies of second halves that the compute stream has waited for
        self.copies = Counter[str]()  # by name
        self._last: LateCopy | None = None

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: StreamMark | None = None,
        name: str = "copy",
        lane: CopyLane = CopyLane.WEIGHTS,
    ) -> _CopyEvent:
        self.copies[name] += 1
        if name == "promote second half":
            self._last = LateCopy(self, target, source, self._last)
            return self._last
        return super().copy(target, source, after, name, lane)
