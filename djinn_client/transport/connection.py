"""A connection to the daemon: a channel and an Exchange, in steps."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from djinn_client.errors import ConnectionLost, FrameTooLarge, InvalidRequest, ProtocolError, from_code
from djinn_client.protocol import Failure, Hello, Progress, Reply, Request, Signal, Welcome
from djinn_client.transport.address import (
    ENVIRONMENT,
    PATH_LIMIT,
    TOKEN_VARIABLE,
    candidates,
    may_be_remote,
    unreachable,
)
from djinn_client.transport.exchange import Delivery, Exchange, close_all, frame_of
from djinn_client.transport.steps import Steps, Wait
from djinn_client.transport.transfer import Direction, OnMoved
from djinn_client.transport.unix_channel import UnixChannel
from djinn_client.version import __version__

OnProgress = Callable[[Progress], None]
R = TypeVar("R", bound=Reply)


class Channel(Protocol):
    """Carries frames, and descriptors of windows, between this process and the daemon: see UnixChannel. Its text is the
    daemon's address."""

    passes_files: bool  # descriptors of files pass, too

    @property
    def closed(self) -> bool: ...

    def watch(self, on_moved: OnMoved | None) -> None:
        """From now on `on_moved` is called as windows pass; None: nothing is called."""

    def send(self, frame: bytes, fds: Sequence[int]) -> Steps[None]: ...

    def offer(self, frame: bytes) -> bool: ...

    def receive(self) -> Steps[tuple[bytes, list[int]]]: ...

    def has_input(self) -> bool: ...

    def close(self, *, silently: bool = False) -> None: ...


class Connection:
    """A connection with one request at a time. An error of the channel or the protocol, or an interrupt inside a step,
    may have torn the stream of bytes and closes the connection. A closed one stays closed.

    A process that is forked from this one finds it closed: both would take each other's replies from one socket."""

    welcome: Welcome  # set by connect()

    def __init__(self, channel: Channel) -> None:
        self.address = str(channel)
        self._channel = channel
        self._exchange = Exchange()
        self._process = os.getpid()
        _all.add(self)

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def passes_files(self) -> bool:
        """False if the daemon is on another machine."""
        return self._channel.passes_files

    def is_hung_up(self) -> bool:
        """True if the connection is closed, here or by the daemon. Call it between two requests: bytes that have come
        then are the daemon's last message."""
        if self.closed:
            return True
        try:
            return self._channel.has_input() and self._exchange.settled
        except OSError:
            return True

    def close(self, *, silently: bool = False) -> None:
        self._channel.close(silently=silently)
        self._exchange.close()

    def call(
        self,
        request: Request,
        expected: type[R],
        on_progress: OnProgress | None = None,
        fds: Sequence[int] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> Steps[Delivery[R]]:
        """Sends the request and returns its final reply. The request is given up when the caller stops or `on_progress`
        raises. The daemon gets duplicates of `fds`, which stay the caller's. `on_progress` is told of the daemon's
        loading, and of windows that pass. `on_sent` is called while the daemon works, so its work costs the caller no
        time if the daemon has more to do.

        Raises the error of a Failure; ConnectionLost; ProtocolError for a reply of another kind than `expected`.
        """
        if on_progress is not None:
            self._channel.watch(_moved(request, on_progress))
        try:
            yield from self.start(request, fds)
            if on_sent is not None:
                on_sent()
            return (yield from self.rest(expected, on_progress))
        except BaseException:
            self.give_up()
            raise
        finally:
            if on_progress is not None:
                self._channel.watch(None)

    def rest(self, expected: type[R], on_progress: OnProgress | None = None) -> Steps[Delivery[R]]:
        """The final reply of a request that has been sent. Raises as `call` does."""
        while isinstance((delivery := (yield from self.receive())).message, Progress):
            if on_progress is not None:
                on_progress(delivery.message)
        if isinstance(delivery.message, expected):
            return Delivery(delivery.message, delivery.fds)
        close_all(delivery.fds)
        raise self.unexpected(delivery)

    def start(self, request: Request, fds: Sequence[int] = ()) -> Steps[None]:
        """Sends the request. A request that is still in flight has no reader any more: it is given up, and its last
        reply is awaited.

        Raises InvalidRequest for values that the wire cannot carry, FrameTooLarge, ConnectionLost.
        """
        self.give_up()
        self._expect_open()
        while self._next() is None and not self._exchange.settled:
            yield from self._read()
        yield from self._send(lambda: self._exchange.start(request, len(fds)), fds)

    def tell(self, message: Signal) -> Steps[None]:
        """Sends a message that has no reply, whatever is in flight. It waits only for room in the socket. If the
        daemon has hung up, the next call raises that. Raises InvalidRequest for a text that the wire cannot carry."""
        return self._send(lambda: frame_of(message))

    def receive(self) -> Steps[Delivery[Reply]]:
        """The next reply to the request in flight. Raises the error of a Failure; ConnectionLost; ProtocolError."""
        while (delivery := self._next()) is None:
            self._expect_open()
            yield from self._read()
        if isinstance(delivery.message, Failure):
            raise from_code(delivery.message.code, delivery.message.message, delivery.message.data)
        return delivery

    def give_up(self) -> None:
        """Ends the request in flight, if there is one, without waiting: one message, and the daemon stops its work."""
        with self._closing_on_error():
            frame = self._exchange.give_up()
            if frame and not self.closed and not self._channel.offer(frame):
                self.close()

    def unexpected(self, delivery: Delivery[Reply]) -> ProtocolError:
        """Closes the connection; the error for a reply that does not fit its request."""
        self.close()
        return ProtocolError(f"{self.address} answered with an unexpected {type(delivery.message).__name__}")

    def _expect_open(self) -> None:
        """Raises InvalidRequest if this process was forked from the connection's, ConnectionLost if the connection is
        closed."""
        if not self.closed:
            return
        if self._process != os.getpid():
            raise InvalidRequest(
                f"this call was begun in process {self._process}, from which this one ({os.getpid()}) was forked, and "
                "its replies come there: close it here, and make another",
                process=self._process,
            )
        raise ConnectionLost(f"the connection to {self.address} was closed here")

    def _send(self, frame: Callable[[], bytes], fds: Sequence[int] = ()) -> Steps[None]:
        """Makes and sends the frame. It is made in here, because from then on its reply is expected: an error before it
        is sent closes the connection."""
        try:
            yield from self._channel.send(frame(), fds)
        except (InvalidRequest, FrameTooLarge):
            raise  # nothing was sent
        except BaseException:
            self.close()  # after a part of a frame nothing else can follow
            raise

    def _read(self) -> Steps[None]:
        """Waits for bytes. A caller that stops while this waits leaves the connection open."""
        try:
            data, fds = yield from self._channel.receive()
            self._exchange.receive(data, fds)
            if not data:
                where = "in the middle of a message" if self._exchange.truncated else "before it had answered"
                raise ConnectionLost(f"the daemon at {self.address} closed the connection {where}")
        except GeneratorExit:
            raise
        except BaseException as error:
            if isinstance(error, OSError):
                self._expect_open()
            self.close()
            if isinstance(error, OSError):
                raise ConnectionLost(f"the connection to {self.address} broke: {error.strerror}") from error
            raise

    def _next(self) -> Delivery[Reply] | None:
        with self._closing_on_error():
            return self._exchange.next_reply()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _moved(request: Request, on_progress: OnProgress) -> OnMoved:
    model = str(getattr(request, "model", ""))

    def told(direction: Direction, done: int, total: int) -> None:
        on_progress(Progress(id=request.id, model=model, stage=direction, done=done, total=total))

    return told


def about(model: str, on_progress: OnProgress | None) -> OnProgress | None:
    """The same `on_progress`, for requests that do not name this model, such as those of a session."""
    if on_progress is None:
        return None
    return lambda progress: on_progress(msgspec.structs.replace(progress, model=model))


_all: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    """Closes the connections in a process that has just been forked. The daemon does not notice, because the parent
    has the same sockets."""
    for connection in list(_all):
        connection.close(silently=True)


os.register_at_fork(after_in_child=_close_copies)


def connect(address: str | None = None, token: str | None = None) -> Steps[Connection]:
    """Connects and introduces itself. `address` is a socket's path, or a daemon of another machine: see
    transport/remote/hosts.py. None: $DJINND_ADDRESS, or the hosts file's default, or a socket: see `candidates`.
    `token` None: the one that comes with the address, or $DJINND_TOKEN; "": none. If $DJINND_ADDRESS is set, its daemon
    is the only one of another machine that gets $DJINND_TOKEN.

    Raises ConnectionLost with the remedy if no daemon answers; VersionMismatch; NotAuthenticated.
    """
    channel, of_address = yield from _reach(address or os.environ.get(ENVIRONMENT) or None)
    connection = Connection(channel)
    try:
        token = (of_address if token is None else token).strip()
        hello = Hello(id=0, client=f"djinn_client {__version__}", token=token)
        connection.welcome = (yield from connection.call(hello, Welcome)).message
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(address: str | None) -> Steps[tuple[Channel, str]]:
    """A channel to the daemon, and the token for it, or ""."""
    if may_be_remote(address):
        from djinn_client.transport.remote import channel, hosts  # and with them ssl, which takes 20 ms

        if (remote := hosts.remote_address(address)) is not None:
            token = hosts.token_for(remote)
            return (yield from channel.reach(remote)), token
    failures: list[tuple[str, OSError]] = []
    for path in candidates(address):
        try:
            return UnixChannel((yield from _connected(path)), path), os.environ.get(TOKEN_VARIABLE, "")
        except OSError as error:
            failures.append((path, error))
    raise unreachable(failures)


def _connected(path: str) -> Steps[socket.socket]:
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # the backlog is full; for Unix sockets no event tells when it has room again
                yield Wait("pause")
    except BaseException:
        sock.close()
        raise
