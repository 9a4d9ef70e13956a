"""Traces the device's work in the next steps. One trace at a time; each gets one reply.

Trace ──► recording ──steps run, or time up──► ended ──its last copies and kernels have run──► read ──► Traced
              └── another Trace: Failed(retry)

A trace has one span for each block of a step, so reading a long one takes tens of milliseconds. It is read in parts,
while steps run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from djinn_client.errors import Retry
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.device import Device, DeviceTrace, Stamp
from djinnd.engine.tuning import READ_AT_ONCE


@dataclass(slots=True)
class _UnderWay:
    request: int
    trace: DeviceTrace
    steps: int  # still to be recorded
    until: float


@dataclass(eq=False)
class Tracer:
    """Used by the engine's thread. The device records from the start of a trace until its last step has run, also page
    copies between steps. Copies queued in that time are recorded even if they happen later.

    The track `host` shows what the engine's thread does before a step, measured by stamps on the compute stream. So it
    shows only the time in which that stream is idle.
    """

    _device: Device
    _send: Callable[[messages.Traced | messages.Failed], None]
    _clock: Callable[[], float] = time.monotonic
    _under_way: _UnderWay | None = field(init=False, default=None)
    _since: Stamp | None = field(init=False, default=None)  # end of the thread's last activity
    # activities since the last step; dropped if no step follows in this turn
    _activities: list[tuple[str, Stamp, Stamp, dict[str, Any]]] = field(init=False, default_factory=list)
    _has_stepped: bool = field(init=False, default=False)  # in this turn of the loop

    def start(self, message: messages.Trace) -> None:
        now = self._clock()
        if self._under_way is not None:
            left = max(0.0, self._under_way.until - now)
            busy = Retry(f"another trace is being recorded, for up to {left:.1f} s more: try again then", seconds=left)
            self._send(messages.Failed(message.request, busy.code, busy.message, busy.data))
            return
        trace = self._device.trace = DeviceTrace(self._device.stamp)
        self._under_way = _UnderWay(message.request, trace, message.steps, now + message.seconds)

    def turn(self) -> None:
        """A turn of the engine's loop begins. Activities of a turn without a step are not recorded."""
        if self._under_way is not None and self._clock() >= self._under_way.until:
            self._under_way.steps, self._device.trace = 0, None
        if not self._has_stepped:
            self._activities.clear()
        self._has_stepped = False
        self._since = None if self._device.trace is None else self._device.stamp()

    def did(self, what: str, **args: Any) -> None:
        """Records an activity of the engine's thread. It began at the turn's start, at the end of a step, or at the end
        of the activity before."""
        since = self._since
        if since is not None and self._device.trace is not None:
            self._since = self._device.stamp()
            self._activities.append((what, since, self._since, args))

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Records the batch that runs inside the context as a step."""
        under_way = self._under_way
        if under_way is None or not under_way.steps:
            yield
            return
        for what, began, ended, args in self._activities:
            under_way.trace.add("host", what, began, ended, **args)
        self._activities.clear()
        self._has_stepped = True
        try:
            chunks = sum([row.count > 1 for row in batch.rows])
            rows, tokens = len(batch.rows), batch.tokens
            with self._device.span("step", "step", model=batch.model, rows=rows, tokens=tokens, chunks=chunks):
                yield
        finally:
            under_way.steps -= 1
            self._since = self._device.stamp()
            if not under_way.steps:
                self._device.trace = None

    def answer(self) -> bool:
        """Reads a part of a trace that has ended, and sends it when all is read. Does not block, and may be called
        while a step runs. → True if more can be read now."""
        under_way = self._under_way
        if under_way is None or under_way.steps:
            return False
        more = under_way.trace.read(READ_AT_ONCE) == READ_AT_ONCE
        if under_way.trace.is_read:
            self._under_way, more = None, False
            self._send(messages.Traced(under_way.request, under_way.trace.spans()))
        return more
