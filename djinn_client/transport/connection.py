"""A connection to the daemon: a non-blocking Unix socket and an Exchange, in steps."""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from djinn_client.errors import ConnectionLost, DjinnError, InvalidRequest, ProtocolError, from_code
from djinn_client.protocol import MAX_FDS, Failure, Hello, Progress, Reply, Request, Signal, Welcome
from djinn_client.transport.address import PATH_LIMIT, candidates, unreachable
from djinn_client.transport.exchange import Delivery, Exchange, close_all, frame_of
from djinn_client.transport.steps import Steps, Wait
from djinn_client.version import __version__

TOKEN_VARIABLE = "DJINND_TOKEN"
CHUNK = 64 << 10  # bytes asked of the socket at once
FDS_SPACE = socket.CMSG_LEN(MAX_FDS * struct.calcsize("i"))

OnProgress = Callable[[Progress], None]
R = TypeVar("R", bound=Reply)


class Connection:
    """A connection with one request at a time. An error of the socket or the protocol, or an interrupt inside a step,
    may have torn the stream of bytes and closes the connection. A closed one stays closed.

    A process that is forked from this one finds it closed: both would take each other's replies from one socket."""

    welcome: Welcome  # set by connect()

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        self.address = address
        self._socket = sock
        self._exchange = Exchange()
        self._process = os.getpid()
        _all.add(self)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def is_hung_up(self) -> bool:
        """True if the connection is closed, here or by the daemon. Call it between two requests: bytes that have come
        then are the daemon's last message."""
        if self.closed:
            return True
        try:
            self._socket.recv(1, socket.MSG_PEEK)
            return self._exchange.settled
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()
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
        raises. The daemon gets duplicates of `fds`, which stay the caller's. `on_sent` is called while the daemon
        works, so its work costs the caller no time if the daemon has more to do.

        Raises the error of a Failure; ConnectionLost; ProtocolError for a reply of another kind than `expected`.
        """
        try:
            yield from self.start(request, fds)
            if on_sent is not None:
                on_sent()
            return (yield from self.rest(expected, on_progress))
        except BaseException:
            self.give_up()
            raise

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
            yield Wait("read", self._socket.fileno())
            self._read()
        yield from self._send(lambda: self._exchange.start(request, len(fds)), fds)

    def tell(self, message: Signal) -> Steps[None]:
        """Sends a message that has no reply, whatever is in flight. It waits only for room in the socket. If the
        daemon has hung up, the next call raises that. Raises InvalidRequest for a text that the wire cannot carry."""
        return self._send(lambda: frame_of(message))

    def receive(self) -> Steps[Delivery[Reply]]:
        """The next reply to the request in flight. Raises the error of a Failure; ConnectionLost; ProtocolError."""
        while (delivery := self._next()) is None:
            self._expect_open()
            yield Wait("read", self._socket.fileno())
            self._read()
        if isinstance(delivery.message, Failure):
            raise from_code(delivery.message.code, delivery.message.message, delivery.message.data)
        return delivery

    def give_up(self) -> None:
        """Ends the request in flight, if there is one, without waiting: one message, and the daemon stops its work."""
        with self._closing_on_error():
            frame = self._exchange.give_up()
            if not frame or self.closed:
                return
            try:
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except OSError:
                sent = 0
            if sent < len(frame):
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
            rest: bytes | memoryview = frame()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            while True:
                try:
                    count = self._socket.sendmsg([rest], rights, socket.MSG_NOSIGNAL)
                    if count == len(rest):
                        return
                    rest = memoryview(rest)[count:]
                    rights = []  # they went with the first byte
                except BlockingIOError:
                    yield Wait("write", self._socket.fileno())
        except (BrokenPipeError, ConnectionResetError):
            return  # a last message of the daemon, which is read next, may say why it hung up
        except DjinnError:
            raise  # nothing was sent
        except BaseException:
            self.close()  # after a part of a frame nothing else can follow
            raise

    def _read(self) -> None:
        with self._closing_on_error():
            try:
                data, passed, flags, _ = self._socket.recvmsg(CHUNK, FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                self._expect_open()
                raise ConnectionLost(f"the connection to {self.address} broke: {error.strerror}") from error
            self._exchange.receive(data, _descriptors(passed))
            if flags & socket.MSG_CTRUNC:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise ConnectionLost(f"no room for a file descriptor: this process may open {limit}; `ulimit -n` more")
            if not data:
                where = "in the middle of a message" if self._exchange.truncated else "before it had answered"
                raise ConnectionLost(f"the daemon at {self.address} closed the connection {where}")

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


_all: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    """Closes the connections in a process that has just been forked. The daemon does not notice, because the parent
    has the same sockets."""
    for connection in list(_all):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)


def _descriptors(passed: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of recvmsg. (socket.recv_fds ignores its flags, so also close-on-exec.)"""
    size = struct.calcsize("i")
    return [
        fd
        for level, kind, data in passed
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in struct.iter_unpack("i", data[: len(data) - len(data) % size])
    ]


def connect(address: str | None = None, token: str | None = None) -> Steps[Connection]:
    """Connects and introduces itself. `address` is a socket's path; None: see `candidates`. `token` None:
    $DJINND_TOKEN; "": none.

    Raises ConnectionLost with the remedy if no daemon answers; VersionMismatch; NotAuthenticated.
    """
    given = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
    failures: list[tuple[str, OSError]] = []
    for path in candidates(address):
        try:
            connection = Connection((yield from _reach(path)), path)
        except OSError as error:
            failures.append((path, error))
            continue
        try:
            hello = Hello(id=0, client=f"djinn_client {__version__}", token=given)
            connection.welcome = (yield from connection.call(hello, Welcome)).message
        except BaseException:
            connection.close()
            raise
        return connection
    raise unreachable(failures)


def _reach(path: str) -> Steps[socket.socket]:
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
