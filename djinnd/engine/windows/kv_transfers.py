"""Exports and imports KV: between the pool and windows that are shared with clients as descriptors.

    export   window made and pinned ─► KV of all tokens computed ─► copied, piece by piece ─► KvExported ─► unpinned
    import   window mapped and pinned ─► pages reserved ──────────► copied, piece by piece ─► Finished ───► unpinned
             (a thread)                  (between steps)                                       (a thread)

Pieces are queued between steps, one a turn of the engine's loop, and at most two are in flight. A piece looks up where
the pages are now and is ordered after the steps before it; the next step is ordered after the piece. So a page cannot
be reassigned while it is being copied, whatever happens to the session between two pieces. A step waits for one piece,
some 0.6 ms on PCIe 5.

A session with imported KV cannot be recomputed from its tokens: Session.foreign_tokens. A request that would have to do
that ends with SessionLost (Engine._fail_lost).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from djinn_client.errors import DjinnError, OutOfMemory, Retry
from djinn_client.transport.shm import map_read_only, map_writable, new_window
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.io.background import BackgroundTask, BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.windows.window import Window
from djinnd.messages import ExportKv, Finished, ImportKv, KvExported
from djinnd.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class KvTransfers:
    """The exports and imports under way. Used by the engine's thread."""

    _device: Device
    _scheduler: Scheduler
    _runners: Mapping[str, ModelRunner]  # by model, a live view
    _channel: ServerChannel
    _background: BackgroundWork
    # submits a request with the export's number that computes the session's missing KV; `filled` is called when it ends
    _fill: Callable[[int, Session], None]
    _filling: dict[int, Future[None]] = field(init=False, default_factory=dict)  # by request that computes missing KV

    def export(self, message: ExportKv) -> None:
        """Exports an idle session. Until KvExported or Failed is sent, the server does nothing with the session but
        close it. Raises SessionNotFound."""
        session = self._scheduler.session(message.session)
        self._background.start(message.request, self._export(message.request, session, self._runners[session.model]))

    def import_(self, message: ImportKv) -> None:
        """Opens the session and takes the descriptor. After Failed the session is useless, and the server closes it."""
        session = Session(message.session, message.model, message.tenant, message.priority, message.tokens)
        session.salt = message.salt
        self._scheduler.open(session)
        task = self._import(message.request, session, self._runners[session.model], message.kv_tokens, message.fd)
        self._background.start(message.request, task)

    def filled(self, request: int, error: DjinnError | None) -> bool:
        """Called for every request that has ended. → False if it computed no KV for an export."""
        filling = self._filling.pop(request, None)
        if filling is None:
            return False
        if error is None:
            filling.set_result(None)
        else:
            filling.set_exception(error)
        return True

    # --- their tasks, in which Scheduler.session raises SessionNotFound if the session has been closed meanwhile ------

    def _export(self, request: int, session: Session, runner: ModelRunner) -> BackgroundTask:
        length = len(session.tokens)
        nbytes = runner.model.layout.nbytes(length)
        try:
            fd = yield from self._background.on_thread(lambda: new_window("djinnd-kv", nbytes))
        except OSError as error:
            raise OutOfMemory(
                f"the host has no {nbytes:,} bytes for the session's KV: {error}", needed=nbytes
            ) from error
        try:
            memory = torch.frombuffer(map_writable(fd, nbytes), dtype=torch.uint8)
            with Window(self._device, memory, runner.plan.page_bytes, self._background) as window:
                yield from self._background.on_thread(window.pin)
                pages = memory.view(-1, runner.plan.page_bytes)
                for first, count in window.pieces():
                    while self._scheduler.session(session.id).computed < length:
                        yield from self._fill_up(request, session)
                    window.queue(
                        (pages[at : at + number], runner.model.pool[page : page + number])
                        for at, page, number in _runs(first, runner.kv.pages_of(session.id)[first : first + count])
                    )
                    yield None
            self._channel.send(KvExported(request, length), [fd])
        finally:
            os.close(fd)

    def _import(self, request: int, session: Session, runner: ModelRunner, tokens: int, fd: int) -> BackgroundTask:
        try:
            memory = torch.frombuffer(map_read_only(fd, runner.model.layout.nbytes(tokens)), dtype=torch.uint8)
        finally:
            os.close(fd)
        with Window(self._device, memory, runner.plan.page_bytes, self._background, read_only=True) as window:
            yield from self._background.on_thread(window.pin)
            yield from self._reserve(self._scheduler.session(session.id), runner, tokens)
            pages = memory.view(-1, runner.plan.page_bytes)
            for first, count in window.pieces():
                present = self._scheduler.session(session.id)
                if present.computed < tokens or self._scheduler.queues[present.model].residency.is_leaving(present):
                    raise Retry("other sessions needed the pages of this one while its KV came: try again")
                window.queue(
                    (runner.model.pool[page : page + number], pages[at : at + number])
                    for at, page, number in _runs(first, runner.kv.pages_of(session.id)[first : first + count])
                )
                yield None
        self._channel.send(Finished(request, "length", len(session.tokens), generated=0, computed=0))

    def _reserve(self, session: Session, runner: ModelRunner, tokens: int) -> BackgroundTask:
        """Reserves pages for the tokens, evicting other sessions if needed. Raises OutOfMemory."""
        kv, length = runner.kv, len(session.tokens)
        if length > kv.capacity_tokens:
            raise OutOfMemory(
                f"the session needs {kv.pages_for(length):,} pages for {length:,} tokens, the pool of {session.model} "
                f"has {kv.pool.capacity:,}: load the model with more KV memory",
                pages=kv.pages_for(length),
                capacity=kv.pool.capacity,
            )
        while not self._scheduler.secure(session.id):
            yield None
        kv.trim(session.id, tokens)
        with self._device.computing():  # before they are written: a later step would zero them afterwards
            runner.pages.zero_stale()
        session.foreign_tokens = tokens
        # its pages get keys, as in any session
        self._scheduler.queues[session.model].residency.advance(session, tokens)
        session.touched = max(other.touched for other in self._scheduler.sessions())

    def _fill_up(self, request: int, session: Session) -> BackgroundTask:
        """Returns when the KV of all tokens is on the device, copied from a lower tier or computed. Raises the error of
        the request that computes it."""
        residency = self._scheduler.queues[session.model].residency
        self._scheduler.wake(session.id)
        while residency.is_moving(self._scheduler.session(session.id)):
            yield None
        if session.remaining == 0:
            return
        filling = self._filling[request] = Future()
        try:
            self._fill(request, session)
        except DjinnError:
            del self._filling[request]
            raise
        yield filling
        filling.result()


def _runs(first: int, pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Groups contiguous pages: (page in the window, page in the pool, number of pages)."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield first + start, pages[start], index - start
            start = index
