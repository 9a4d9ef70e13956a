"""Delivers captured activations to clients: a sealed memfd, filled after the request has ended.

The request captures the points that it asked for, or the point of the breakpoint where it stopped.

    start    window made on a thread, and pinned if it is large, while the request runs
    end      ─► copied, piece by piece ─► Finished, with the descriptor ─► unpinned on the thread

Work that can overlap with a step is done during one, if there is one: starting to make the window, copying the first
piece, sending the reply, freeing the rows. The request keeps its captured rows until they have been copied. A request
that is cancelled or fails gets its reply at once, and its captures are dropped.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from djinn_client.errors import DjinnError, OutOfMemory
from djinn_client.protocol.fields.points import Point
from djinn_client.transport.shm import map_writable, new_window
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device, StreamMark
from djinnd.engine.io.background import BackgroundTask, BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.tuning import STAGED_BYTES
from djinnd.engine.windows.window import StagedWindow, Window
from djinnd.kvcache.tier import HOST_PAGE, whole_pages
from djinnd.messages import CaptureLayout, Finished

Copies = list[tuple[Tensor, Tensor]]  # target and source


@dataclass(slots=True, eq=False)
class _Delivery:
    session: Session
    request: Request
    runner: ModelRunner
    first: int  # position
    room: int  # positions
    memory: _Memory
    # of each point in the window, in bytes; set when the window is begun
    offsets: list[int] = field(default_factory=list)
    made: Future[None] | None = None
    reply: Finished | None = None  # set when the request has ended
    # set when the request has ended: the captured bytes of each point, uint8 on the device, and when they are complete
    rows: Iterable[Tensor] = ()
    after: StreamMark | None = None
    pieces: deque[Copies] | None = None  # pieces to be copied; None: none has been copied yet

    def done(self) -> bool:
        """True if the request has ended; the task waits for that."""
        return self.reply is not None

    @property
    def positions(self) -> int:
        """The number of positions captured. The last generated token has not been run, except where the request stopped
        or its logits were not finite."""
        reply = self.reply
        assert reply is not None
        if reply.stopped is not None or reply.reason == "not_finite":
            return reply.length - self.first
        return self.request.prompt_end + max(reply.generated - 1, 0) - self.first

    @property
    def has_memory(self) -> bool:
        return self.made is not None and self.made.done() and self.made.exception() is None

    def in_pieces(self) -> Iterator[Copies]:
        """The copies of each piece of the window that has any."""
        captured = list(self.rows)
        for first, count in self.memory.window.pieces():
            begin, end = first * HOST_PAGE, (first + count) * HOST_PAGE
            copies = Copies()
            for offset, rows in zip(self.offsets, captured, strict=True):
                low, high = max(offset, begin), min(offset + len(rows), end)
                if low < high:
                    copies.append((self.memory.bytes[low:high], rows[low - offset : high - offset]))
            if copies:
                yield copies

    def finished(self) -> Finished:
        assert self.reply is not None
        dtype = str(self.runner.probes.captures.dtype).removeprefix("torch.")
        capture = CaptureLayout(
            dtype=dtype,  # type: ignore[arg-type]
            first=self.first,
            positions=self.positions,
            room=self.room,
            nbytes=self.memory.nbytes,
            offsets=self.offsets,
        )
        return msgspec.structs.replace(self.reply, capture=capture)


@dataclass(eq=False)
class Deliveries:
    """The deliveries that have not been sent. Used by the engine's thread."""

    _device: Device
    _channel: ServerChannel
    _background: BackgroundWork
    _fail: Callable[[Session, Request, DjinnError], None]  # ends a request if its window cannot be made
    _deliveries: dict[int, _Delivery] = field(init=False, default_factory=dict)  # by request
    _to_make: list[_Delivery] = field(init=False, default_factory=list)
    _to_copy: list[_Delivery] = field(init=False, default_factory=list)  # ended requests, with pieces to copy
    _to_send: list[_Delivery] = field(init=False, default_factory=list)  # ended requests, with all copies queued

    def open(self, session: Session, request: Request, runner: ModelRunner) -> None:
        """Reserves rows for the request's captures and starts its delivery. Raises OutOfMemory if the device has no
        room."""
        first = request.seen_from
        last = request.prompt_end + max(request.max_tokens - 1, 0)
        self._open(session, request, runner, request.capture, first, min(last, runner.plan.max_context) - first)

    def open_hit(self, session: Session, request: Request, runner: ModelRunner, block: int) -> None:
        """Like `open`, for a request that stops before `block`: captures every position that has not run through all
        blocks. Raises OutOfMemory."""
        first, end = session.computed, len(session.tokens)
        self._open(session, request, runner, (Point("resid", block),), first, end - first)

    def _open(
        self,
        session: Session,
        request: Request,
        runner: ModelRunner,
        points: tuple[Point, ...],
        first: int,
        room: int,
    ) -> None:
        runner.probes.captures.open(request.id, points, first, room)
        delivery = _Delivery(session, request, runner, first, room, _Memory(self._device, self._background))
        self._deliveries[request.id] = delivery
        self._to_make.append(delivery)
        self._background.start(request.id, self._deliver(delivery))

    def advance(self) -> bool:
        """Advances deliveries while the device runs a step. → True if one may finish during the step."""
        for delivery in list(self._to_make):
            self._make(delivery)
        for delivery in [each for each in self._to_copy if each.has_memory]:
            self._copy_piece(delivery)
        for delivery in [each for each in self._to_send if each.memory.window.is_filled]:
            self._send_reply(delivery)
            self._background.drop(delivery.request.id)
        return bool(self._to_send)

    def ended(self, request: Request, reply: Finished) -> None:
        """Copies a finished request's captures, and sends the reply when they are copied."""
        delivery = self._deliveries[request.id]
        delivery.reply = reply
        delivery.rows = delivery.runner.probes.captures.rows_of(request.id, delivery.positions)
        delivery.after = self._device.mark()
        self._to_copy.append(delivery)

    def drop(self, request: Request) -> None:
        """Frees the captures of a request that was cancelled or failed. Does nothing for a request without captures, or
        with a reply."""
        delivery = self._deliveries.pop(request.id, None)
        if delivery is not None:
            self._background.drop(request.id)
            self._close(delivery)  # needed if the task has not begun

    def abandon(self, runner: ModelRunner) -> None:
        """Before a model is unloaded: sends all outstanding replies without their captures. A request that stopped at a
        breakpoint ends as cancelled."""
        for delivery in [each for each in self._deliveries.values() if each.runner is runner]:
            reply = delivery.reply
            assert reply is not None, f"{runner.name} goes while request {delivery.request.id} runs"
            self.drop(delivery.request)
            if reply.stopped is not None:
                reply = msgspec.structs.replace(reply, reason="cancelled", stopped=None)
            self._channel.send(reply)

    def _deliver(self, delivery: _Delivery) -> BackgroundTask:
        request = delivery.request
        try:
            yield None  # a short delivery is handled by `advance` from here on
            made = self._make(delivery)
            yield made
            try:
                made.result()
            except OutOfMemory as error:
                del self._deliveries[request.id]
                self._fail(delivery.session, request, error)
                return
            yield delivery
            yield None  # let the next step be launched: the first piece is copied beside it
            if delivery.pieces is None:
                self._copy_piece(delivery)
            while delivery.pieces:
                yield None
                self._copy_piece(delivery)
            yield None
            self._send_reply(delivery)
        finally:
            self._close(delivery)

    def _copy_piece(self, delivery: _Delivery) -> None:
        """Queues the copies of the next piece, if there is one."""
        if delivery.pieces is None:
            self._to_copy.remove(delivery)
            delivery.pieces = deque(delivery.in_pieces())
        if delivery.pieces:
            delivery.memory.window.queue(delivery.pieces.popleft(), delivery.after)
        if not delivery.pieces:
            self._to_send.append(delivery)

    def _make(self, delivery: _Delivery) -> Future[None]:
        if delivery.made is None:
            self._to_make.remove(delivery)
            *delivery.offsets, end = delivery.runner.probes.captures.offsets(delivery.request.id)
            delivery.made = self._background.begin(lambda: delivery.memory.make(whole_pages(end)))
        return delivery.made

    def _send_reply(self, delivery: _Delivery) -> None:
        """Waits for the copies and sends the reply, once."""
        if delivery in self._to_send:
            self._to_send.remove(delivery)
            delivery.memory.window.settle()
            del self._deliveries[delivery.request.id]
            self._channel.send(delivery.finished(), [delivery.memory.fd])

    def _close(self, delivery: _Delivery) -> None:
        for some in (self._to_make, self._to_copy, self._to_send):
            if delivery in some:
                some.remove(delivery)
        delivery.runner.probes.captures.close(delivery.request.id)
        self._background.later(delivery.memory.close)


class _Memory:
    """The memory of a window, made and freed on the thread of BackgroundWork."""

    def __init__(self, device: Device, background: BackgroundWork) -> None:
        self._device = device
        self._background = background
        self.fd = -1
        self.bytes: Tensor
        self.window: Window

    @property
    def nbytes(self) -> int:
        return len(self.bytes)

    def make(self, nbytes: int) -> None:
        """Raises OutOfMemory."""
        try:
            self.fd = new_window("djinnd-capture", nbytes)
        except OSError as error:
            raise OutOfMemory(
                f"the host has no {nbytes:,} bytes for the captured activations: {error}", needed=nbytes
            ) from error
        self.bytes = torch.frombuffer(map_writable(self.fd, nbytes), dtype=torch.uint8)
        kind = StagedWindow if nbytes <= STAGED_BYTES else Window
        self.window = kind(self._device, self.bytes, HOST_PAGE, self._background)
        self.window.pin()

    def close(self) -> None:
        if self.fd < 0:
            return
        if hasattr(self, "window"):
            self.window.settle()
            self.window.release()
        os.close(self.fd)
        self.fd = -1
