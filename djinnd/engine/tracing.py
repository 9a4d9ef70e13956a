"""Records what the device does in the next steps, for whoever asked. One trace at a time, each with one answer.

Trace ──► recording ──steps run, or time up──► ended ──its last copies and kernels have run──► Traced
              └── another Trace: Failed(retry)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from djinn_client.errors import Retry
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.device import Device, Trace


@dataclass(slots=True)
class _UnderWay:
    request: int
    trace: Trace
    steps: int  # still to be recorded
    until: float


class Tracer:
    """Used by the engine's thread. The device has the trace from its start until its last step has been run: pages move
    between steps, too. Copies that were queued meanwhile are recorded whenever they happen."""

    def __init__(
        self,
        device: Device,
        send: Callable[[messages.Traced | messages.Failed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._send = send
        self._clock = clock
        self._under_way: _UnderWay | None = None

    def start(self, message: messages.Trace) -> None:
        now = self._clock()
        if self._under_way is not None:
            left = max(0.0, self._under_way.until - now)
            busy = Retry(f"another trace is being recorded, for up to {left:.1f} s more: try again then", seconds=left)
            self._send(messages.Failed(message.request, busy.code, busy.message, busy.data))
            return
        trace = self._device.trace = Trace(self._device.stamp)
        self._under_way = _UnderWay(message.request, trace, message.steps, now + message.seconds)

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """The batch is run meanwhile."""
        under_way = self._under_way
        if under_way is None or not under_way.steps:
            yield
            return
        try:
            with self._device.span("step", "step", model=batch.model, rows=len(batch.rows), tokens=batch.tokens):
                yield
        finally:
            under_way.steps -= 1
            if not under_way.steps:
                self._device.trace = None

    def answer(self) -> None:
        """Between steps: sends the trace that is complete, if one is. Waits for nothing."""
        under_way = self._under_way
        if under_way is None:
            return
        if self._clock() >= under_way.until:
            under_way.steps, self._device.trace = 0, None
        if not under_way.steps and under_way.trace.is_passed:
            self._under_way = None
            self._send(messages.Traced(under_way.request, under_way.trace.spans()))
