"""KV on its way between the pool and windows, which pass to and from clients as descriptors.

    export   window made and pinned ─► KV of all tokens computed ─► copied, piece by piece ─► KvExported ─► unpinned
    import   window mapped and pinned ─► pages reserved ──────────► copied, piece by piece ─► Finished ───► unpinned
             (a thread)                  (between steps)                                       (a thread)

Pieces are queued between steps, one a turn of the engine's loop, and two are in flight at most. A piece looks up where
the pages are now, waits for the steps before it, and the next step waits for it: so nobody can be given a page under a
copy, whatever happens to the session between two pieces. What a step waits is a piece's time, some 0.6 ms on PCIe 5.

A session whose KV came so cannot be computed anew: Session.foreign_tokens. Whoever would have to ends the request with
SessionLost (Engine._fail_lost), so that nothing is made up.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from djinn_client.errors import DjinnError, OutOfMemory, Retry, SessionNotFound
from djinn_client.shm import map_read_only, map_writable, new_window
from djinnd.core.session import Session
from djinnd.device import Device, Event, Lane
from djinnd.engine.channel import Channel
from djinnd.engine.model_runner import ModelRunner
from djinnd.messages import ExportKv, Failed, Finished, ImportKv, KvExported
from djinnd.scheduler.scheduler import Scheduler

log = logging.getLogger("djinnd.engine")

PIECE_BYTES = 32 << 20
_HOST_PAGE = 4096

Wait = Future[Any] | None  # come back when it is done; None: in the next turn
Course = Generator[Wait, None, None]


@dataclass(slots=True, eq=False)
class _Passage:
    course: Course
    waits: Wait = None
    filling: Future[None] | None = None  # while the KV that lacks is computed


class Passages:
    """Belongs to the engine's thread. `fill` submits a request with the passage's number that computes the KV that a
    session lacks; how that ends is told by `filled`."""

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        runners: Mapping[str, ModelRunner],
        channel: Channel,
        fill: Callable[[int, Session], None],
    ) -> None:
        """`runners`: by model, as they are at any time."""
        self._device = device
        self._scheduler = scheduler
        self._runners = runners
        self._channel = channel
        self._fill = fill
        self._passages: dict[int, _Passage] = {}  # by request
        self._aside = ThreadPoolExecutor(1, "djinn-windows")

    def export(self, message: ExportKv) -> None:
        """Of an idle session, which nobody but its close touches until KvExported, or Failed, is sent."""
        try:
            session = self._present(message.session)
        except SessionNotFound as error:
            self._refuse(message.request, error)
            return
        course = self._export(message.request, session, self._runners[session.model])
        self._passages[message.request] = _Passage(course)

    def import_(self, message: ImportKv) -> None:
        """Opens the session; takes the descriptor. Ends with Finished, or with Failed: what the session then has is of
        no use, and it is the server's to close."""
        session = Session(message.session, message.model, message.tenant, message.priority, message.tokens)
        session.salt = message.salt
        self._scheduler.open(session)
        course = self._import(message.request, session, self._runners[session.model], message.kv_tokens, message.fd)
        self._passages[message.request] = _Passage(course)

    def filled(self, request: int, error: DjinnError | None) -> bool:
        """A request has ended. False: it is none of these."""
        passage = self._passages.get(request)
        if passage is None or passage.filling is None:
            return False
        filling, passage.filling = passage.filling, None
        if error is None:
            filling.set_result(None)
        else:
            filling.set_exception(error)
        return True

    def turn(self) -> bool:
        """Once in each turn of the engine's loop. → whether something goes on in the next one at once."""
        busy = False
        for request, passage in list(self._passages.items()):
            if passage.waits is not None and not passage.waits.done():
                continue
            try:
                passage.waits = next(passage.course)
            except StopIteration:
                del self._passages[request]
            except DjinnError as error:
                del self._passages[request]
                self._refuse(request, error)
            else:
                busy |= passage.waits is None
        return busy

    def _refuse(self, request: int, error: DjinnError) -> None:
        self._channel.send(Failed(request, error.code, error.message, error.data))

    def close(self) -> None:
        for passage in self._passages.values():
            passage.course.close()
        self._aside.shutdown()

    # --- the two ----------------------------------------------------------------------------------------------------

    def _export(self, request: int, session: Session, runner: ModelRunner) -> Course:
        length = len(session.tokens)
        shape, dtype = _shape(runner, length), runner.model.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            fd = yield from self._elsewhere(lambda: new_window("djinnd-kv", nbytes))
        except OSError as error:
            raise OutOfMemory(
                f"the host has no {nbytes:,} bytes for the session's KV: {error}", needed=nbytes
            ) from error
        try:
            memory = torch.frombuffer(map_writable(fd, nbytes), dtype=torch.uint8)
            with _Window(self._device, memory, runner.plan.page_bytes, self._aside) as window:
                yield from self._elsewhere(window.pin)
                pages = memory.view(dtype).view(shape)
                for first, count in window.pieces():
                    while self._present(session.id).computed < length:
                        yield from self._fill_up(request, session)
                    window.queue(
                        (pages[at : at + number], runner.model.pool[page : page + number])
                        for at, page, number in _runs(first, runner.kv.pages_of(session.id)[first : first + count])
                    )
                    yield None
            self._channel.send(KvExported(request, length), [fd])
        finally:
            os.close(fd)

    def _import(self, request: int, session: Session, runner: ModelRunner, tokens: int, fd: int) -> Course:
        shape, dtype = _shape(runner, tokens), runner.model.dtype
        try:
            memory = torch.frombuffer(map_read_only(fd, math.prod(shape) * dtype.itemsize), dtype=torch.uint8)
        finally:
            os.close(fd)
        with _Window(self._device, memory, runner.plan.page_bytes, self._aside, read_only=True) as window:
            yield from self._elsewhere(window.pin)
            yield from self._reserve(self._present(session.id), runner, tokens)
            pages = memory.view(dtype).view(shape)
            for first, count in window.pieces():
                if self._present(session.id).computed < tokens:
                    raise Retry("other sessions needed the pages of this one while its KV came: try again")
                window.queue(
                    (runner.model.pool[page : page + number], pages[at : at + number])
                    for at, page, number in _runs(first, runner.kv.pages_of(session.id)[first : first + count])
                )
                yield None
        self._channel.send(Finished(request, "length", len(session.tokens), generated=0, computed=0))

    def _reserve(self, session: Session, runner: ModelRunner, tokens: int) -> Course:
        """Pages for the tokens, at the cost of other sessions. Raises OutOfMemory."""
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
        stale = kv.take_stale()
        if stale:  # before they are written: a later step would zero them then
            with self._device.computing():
                runner.model.zero_pages(stale)
        session.computed = session.foreign_tokens = tokens
        session.touched = max(other.touched for other in self._scheduler.sessions())

    def _present(self, session_id: str) -> Session:
        """Raises SessionNotFound where it was closed meanwhile."""
        return self._scheduler.session(session_id)

    def _fill_up(self, request: int, session: Session) -> Course:
        """Returns when the KV of all tokens is on the device: brought back from where it is, or computed. Raises what
        became of the request that computes it."""
        residence = self._scheduler.residence(session.model)
        self._scheduler.wake(session.id)
        while residence.is_moving(self._present(session.id)):
            yield None
        if session.remaining == 0:
            return
        filling = self._passages[request].filling = Future()
        try:
            self._fill(request, session)
        except DjinnError:
            self._passages[request].filling = None
            raise
        yield filling
        filling.result()

    def _elsewhere(self, act: Callable[[], Any]) -> Generator[Wait, None, Any]:
        """What takes longer than a step may wait."""
        future = self._aside.submit(act)
        future.add_done_callback(lambda _: self._channel.wake())
        yield future
        return future.result()


class _Window:
    """Host memory while it is pinned and copied from or to. Leaving the context waits for the copies in flight, and has
    the memory unpinned in the thread of `aside`."""

    def __init__(
        self, device: Device, memory: Tensor, page_bytes: int, aside: ThreadPoolExecutor, *, read_only: bool = False
    ) -> None:
        """memory: uint8 [pages * page_bytes]"""
        self._device = device
        self._memory = memory
        self._page_bytes = page_bytes
        self._aside = aside
        self._read_only = read_only
        self._lane = Lane.UP if read_only else Lane.DOWN
        self._pinned: list[Tensor] = []
        self._flying: deque[Event] = deque()

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First page and count. A piece starts on a page of the host, too: so each is pinned by itself."""
        pages = len(self._memory) // self._page_bytes
        align = _HOST_PAGE // math.gcd(self._page_bytes, _HOST_PAGE)
        count = max(PIECE_BYTES // self._page_bytes // align, 1) * align
        return ((first, min(count, pages - first)) for first in range(0, pages, count))

    def pin(self) -> None:
        """Raises OutOfMemory."""
        size = self._page_bytes
        pieces = [self._memory[first * size : (first + count) * size] for first, count in self.pieces()]
        self._device.pin(pieces, read_only=self._read_only)
        self._pinned = pieces

    def queue(self, copies: Iterator[tuple[Tensor, Tensor]]) -> None:
        """One piece, target and source of each copy."""
        after, event = self._device.mark(), None
        for target, source in copies:
            event = self._device.copy(target, source, after, "window", self._lane)
        assert event is not None, "a piece without pages"
        event.order()
        self._flying.append(event)
        if len(self._flying) > 2:
            self._flying.popleft().wait()

    def __enter__(self) -> _Window:
        return self

    def __exit__(self, *error: object) -> None:
        while self._flying:
            self._flying.popleft().wait()
        self._aside.submit(self._release).add_done_callback(_told)

    def _release(self) -> None:
        """Behind `pin` in the thread, where that is still under way."""
        self._device.unpin(self._pinned)
        self._pinned = []


def _shape(runner: ModelRunner, tokens: int) -> tuple[int, ...]:
    return (runner.kv.pages_for(tokens), *runner.model.pool.shape[1:])


def _runs(first: int, pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours travel together: place in the window, page in the pool, and how many."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield first + start, pages[start], index - start
            start = index


def _told(release: Future[None]) -> None:
    if (error := release.exception()) is not None:
        log.error("window_not_released error=%r", error)
