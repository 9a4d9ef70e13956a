"""A session over its connection: how it is opened, called one call at a time, and ended."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from djinn_client.arguments import folders
from djinn_client.arguments.options import build
from djinn_client.errors import ConnectionLost, SessionBusy, SessionNotFound, SessionStateError
from djinn_client.protocol import (
    AttachSession,
    Class,
    CloseSession,
    Done,
    ForkSession,
    Forward,
    Generate,
    Generated,
    ImportSession,
    OpenSession,
    Progress,
    Reply,
    Request,
    SessionInfo,
    SessionOpened,
)
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.session.streaming import StreamSteps
from djinn_client.transport.connection import Connection, OnProgress, about, connect
from djinn_client.transport.exchange import Delivery, close_all
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from typing import Self

    from djinn_client.tensors.hits import Hit

R = TypeVar("R", bound=Reply)
Entry = OpenSession | AttachSession | ForkSession | ImportSession  # requests that give a connection its session


class Runner(Protocol):
    """Runs the Generate calls of a session in its place, as long as bool(runner) is True."""

    def __bool__(self) -> bool: ...

    def copy(self) -> Self: ...

    def run(
        self, session: ConnectedSession, connection: Connection, request: Generate
    ) -> Steps[Delivery[Generated]]: ...


class ConnectedSession:
    """One session over one connection.

    The session outlives its connection. When the connection was lost, or closed by an interrupt, or belongs to the
    process from which this one was forked, the next call connects again and attaches. One call runs at a time: a second
    one, from another thread or task or inside the loop over an open stream, raises SessionBusy.
    """

    def __init__(self, address: str | None, token: str | None = None) -> None:
        self._address = address
        self._token = token
        self._connection: Connection | None = None
        self._info: SessionInfo | None = None
        self.at: HitInfo | None = None  # the breakpoint at which the last call has stopped
        self.hit: Hit | None = None  # the activation there, if it is mapped
        self._left: Hit | None = None  # of the call before; its 20 MB are unmapped, in 1 ms, while the next call runs
        self.interventions: Runner | None = None  # the functions that the session's calls stop for
        self._ended = ""  # "closed" or "detached"
        self._process = 0  # the process that has opened it, and closes it
        self._turn = threading.Lock()  # held while a call's steps run, only by `with`: no interrupt can leave it held
        self._stream: weakref.ref[StreamSteps] | None = None  # the last one that began

    @property
    def info(self) -> SessionInfo:
        if self._info is None:
            raise SessionStateError("the session is not open yet: use `async with`, or await open()")
        return self._info

    @property
    def ended(self) -> bool:
        """True after close() or detach()."""
        return bool(self._ended)

    def open(
        self,
        model: str,
        priority: Class | None,
        on_progress: OnProgress | None,
        adapter: str | os.PathLike[str] | None = None,
    ) -> Steps[None]:
        name = "" if adapter is None else folders.model_name(adapter)
        request = build(OpenSession, model=folders.model_name(model), priority=priority, adapter=name)
        yield from self.enter(request, on_progress)

    def attach(self, session: str) -> Steps[None]:
        yield from self.enter(build(AttachSession, session=session))

    def call(self, request: Request, expected: type[R], on_progress: OnProgress | None = None) -> Steps[Delivery[R]]:
        """Sends a request over the session's connection and returns its final reply. The caller owns its
        descriptors."""
        self._expect_idle()
        told = on_progress and about(self.info.model, on_progress)
        with self._turn:
            self._expect_no_stream()
            connection = yield from self._connected()
            if not isinstance(request, Generate | Forward):
                return (yield from connection.call(request, expected, told))
            if self.interventions and isinstance(request, Generate):
                answer = yield from self.interventions.run(self, connection, request)
                assert isinstance(answer.message, expected)
                return Delivery(answer.message, answer.fds)
            return (yield from self.run_over(connection, request, expected, told))

    def call_generate(self, request: Generate) -> Steps[Generated]:
        answer = yield from self.call(request, Generated)
        close_all(answer.fds)
        return answer.message

    def generate_beside(
        self, others: Sequence[ConnectedSession], requests: Sequence[Generate]
    ) -> Steps[list[Generated]]:
        """Runs one call on this session and one on each of the others at once. If one fails, all are given up."""
        connections: list[Connection] = []
        with ExitStack() as turns:
            for session in (self, *others):
                session._expect_idle()
                turns.enter_context(session._turn)
            try:
                for session, request in zip((self, *others), requests, strict=True):
                    session.stopped_at(None)
                    connections.append((yield from session._connected()))
                    yield from connections[-1].start(request)
                replies = []
                for session, connection in zip((self, *others), connections, strict=True):
                    replies.append((yield from connection.rest(Generated)))
                    close_all(replies[-1].fds)
                    session.stopped_at(replies[-1].message.hit)
                return [reply.message for reply in replies]
            except BaseException:
                for connection in connections:
                    connection.give_up()
                raise

    def next_of(self, stream: StreamSteps) -> Steps[Delivery[Reply]]:
        """The stream's next reply. The first call sends the request. Until its end the session takes no other."""
        self._expect_idle(stream)
        with self._turn:
            self._expect_no_stream(stream)
            if stream.connection is None:
                self._expect_no_interventions("stream")
                self._stream = weakref.ref(stream)
                stream.connection = yield from self._connected()
                self.stopped_at(None)
                yield from stream.connection.start(stream.request)
            while isinstance((delivery := (yield from stream.connection.receive())).message, Progress):
                pass
            if isinstance(delivery.message, Generated):
                self.stopped_at(delivery.message.hit)
            return delivery

    def run_over(
        self, connection: Connection, request: Request, expected: type[R], on_progress: OnProgress | None = None
    ) -> Steps[Delivery[R]]:
        """Runs a call that resumes from a hit or may stop at one. A call that fails leaves the hit as it was. The
        caller holds the turn."""
        at, hit = self.at, self.hit
        self.stopped_at(None)
        try:
            answer = yield from connection.call(request, expected, on_progress, on_sent=self._forget_left)
        except BaseException:
            self.at, self.hit = at, hit
            raise
        self._left = hit
        if isinstance(answer.message, Generated):
            self.at = answer.message.hit
        return answer

    def stopped_at(self, at: HitInfo | None) -> None:
        self.at, self.hit = at, None

    def close(self) -> Steps[None]:
        """Closes the session in the daemon. Does nothing if it is closed, detached or gone already. In a process that
        was forked from the one that opened it: detach()."""
        if self._ended or self._info is None:
            return
        if self._process != os.getpid():
            self.detach()
            return
        self._close_stream()
        self._expect_idle()
        with self._turn:
            try:
                yield from self._close_there(build(CloseSession, session=self._info.id))
                self._ended = "closed"
            finally:
                self._hang_up()

    def _close_there(self, request: CloseSession) -> Steps[None]:
        """The connection may be lost since the last call, because the daemon has restarted. Its successor has the
        session, so the request is then sent over a new connection."""
        with suppress(ConnectionLost, SessionNotFound):
            if self._connection is not None and not self._connection.closed:
                with suppress(ConnectionLost):
                    yield from self._connection.call(request, Done)
                    return
            self._connection = yield from connect(self._address, self._token)
            yield from self._connection.call(request, Done)

    def detach(self) -> None:
        """Closes only the connection. The daemon keeps the session for limits.session_grace, and `attach` takes it up
        again. Does nothing if it is not open yet."""
        self._close_stream()
        self._expect_idle()
        with self._turn:
            if self._info is not None:
                self._ended = self._ended or "detached"
                self._hang_up()

    def _forget_left(self) -> None:
        self._left = None

    def _connected(self) -> Steps[Connection]:
        """The session's connection, made anew if need be. The caller holds the turn."""
        self.expect_held()
        if self._connection is None or self._connection.closed:
            yield from self._begin(build(AttachSession, session=self.info.id))
        assert self._connection is not None
        return self._connection

    def _beside(self, request: Request, expected: type[R]) -> Steps[Delivery[R]]:
        """A call over a connection of its own, since a call may be running on the session's connection."""
        self.expect_held()
        connection = yield from connect(self._address, self._token)
        try:
            return (yield from connection.call(request, expected))
        finally:
            connection.close()

    def enter(self, request: Entry, on_progress: OnProgress | None = None, fds: Sequence[int] = ()) -> Steps[None]:
        """Sends the request over a new connection, which is the session's from then on. Does nothing if it has one."""
        self._expect_idle()
        with self._turn:
            if self._info is None:
                self._process = os.getpid()
                yield from self._begin(request, on_progress, fds)

    def _begin(self, request: Entry, on_progress: OnProgress | None = None, fds: Sequence[int] = ()) -> Steps[None]:
        """Connects and opens or attaches the session. A caller that stops waiting hangs up: a load may take minutes."""
        connection = yield from connect(self._address, self._token)
        try:
            if isinstance(request, OpenSession | ImportSession):
                answer = yield from folders.call(connection, request, SessionOpened, on_progress, fds)
            else:
                answer = yield from connection.call(request, SessionOpened, on_progress, fds)
            self._info = answer.message.session
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        if self._info.hit != self.at:
            self.stopped_at(self._info.hit)

    def _hang_up(self) -> None:
        """Closes the connection and drops the hits: the daemon charges a window until its last mapping is gone."""
        if self._connection is not None:
            self._connection.close()
        self.hit = self._left = None

    def _close_stream(self) -> None:
        if self._stream is not None and (stream := self._stream()) is not None:
            stream.close()

    def expect_held(self) -> None:
        """Raises SessionStateError if the session was closed or detached."""
        if self._ended:
            raise SessionStateError(f"this session was {self._ended} here: open a new one, or attach() to its id")

    def _expect_no_interventions(self, call: str) -> None:
        """Raises SessionStateError."""
        if self.interventions:
            raise SessionStateError(
                f"{call} stops for no intervention, and this session has some: take generate or run, or remove them"
            )

    def _expect_idle(self, stream: StreamSteps | None = None) -> None:
        """Raises SessionBusy while a call runs or another stream is open."""
        self._expect_not_at_work()
        self._expect_no_stream(stream)

    def _expect_not_at_work(self) -> None:
        if self._turn.locked():
            raise SessionBusy("another call on this session is running: one at a time, or open a second session")

    def _expect_no_stream(self, but: StreamSteps | None = None) -> None:
        stream = None if self._stream is None else self._stream()
        if stream is not None and stream is not but and not stream.ended:
            raise SessionBusy("a stream of this session is open: read it to its end or close it first")
