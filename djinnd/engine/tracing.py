"""Records what the device does in the next steps, for whoever asked. One trace at a time, each with one answer.

Trace ──► recording ──steps run, or time up──► ended ──its last copies and kernels have run──► read ──► Traced
              └── another Trace: Failed(retry)

A step has a span a block, so reading a long trace takes tens of milliseconds: it is done in parts, beside steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from djinn_client.errors import Retry
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.device import Device, Stamp, Trace

READ_AT_ONCE = 128  # spans, a few microseconds each


@dataclass(slots=True)
class _UnderWay:
    request: int
    trace: Trace
    steps: int  # still to be recorded
    until: float


class Tracer:
    """Used by the engine's thread. The device has the trace from its start until its last step has been run: pages move
    between steps, too. Copies that were queued meanwhile are recorded whenever they happen.

    What the engine's thread does before a step is on the track `host`, as the device's compute stream sees it: for as
    long as that has nothing to do meanwhile, and for no time at all where it has."""

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
        self._since: Stamp | None = None  # when the engine's thread was last done with something
        self._before: list[tuple[str, Stamp, Stamp, dict[str, Any]]] = []  # it did that, and a step may follow
        self._has_stepped = False  # in this turn

    def start(self, message: messages.Trace) -> None:
        now = self._clock()
        if self._under_way is not None:
            left = max(0.0, self._under_way.until - now)
            busy = Retry(f"another trace is being recorded, for up to {left:.1f} s more: try again then", seconds=left)
            self._send(messages.Failed(message.request, busy.code, busy.message, busy.data))
            return
        trace = self._device.trace = Trace(self._device.stamp)
        self._under_way = _UnderWay(message.request, trace, message.steps, now + message.seconds)

    def turn(self) -> None:
        """A turn of the engine's loop begins. What the last one has done without a step is not told."""
        if self._under_way is not None and self._clock() >= self._under_way.until:
            self._under_way.steps, self._device.trace = 0, None
        if not self._has_stepped:
            self._before.clear()
        self._has_stepped = False
        self._since = None if self._device.trace is None else self._device.stamp()

    def did(self, what: str, **args: Any) -> None:
        """The engine's thread, since the turn began, a step was over, or it did something else."""
        since = self._since
        if since is not None and self._device.trace is not None:
            self._since = self._device.stamp()
            self._before.append((what, since, self._since, args))

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """The batch is run meanwhile."""
        under_way = self._under_way
        if under_way is None or not under_way.steps:
            yield
            return
        for what, began, ended, args in self._before:
            under_way.trace.add("host", what, began, ended, **args)
        self._before.clear()
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
        """Of a trace that has ended, reads some more, and sends it when that was all; also beside a step. Waits for
        nothing. → whether there is more that can be read."""
        under_way = self._under_way
        if under_way is None or under_way.steps:
            return False
        more = under_way.trace.read(READ_AT_ONCE) == READ_AT_ONCE
        if under_way.trace.is_read:
            self._under_way, more = None, False
            self._send(messages.Traced(under_way.request, under_way.trace.spans()))
        return more
