"""The engine's end of the socket pair. Receiving belongs to the engine's thread; any thread may send."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from djinn_client.errors import DjinnError
from djinn_client.protocol import FrameDecoder
from djinnd.confinement.channel import receive
from djinnd.messages import MAX_FDS, MAX_FRAME, Failed, FromEngine, ToEngine, decode_to_engine, encode


class ServerGone(Exception):
    """The server closed its end of the channel: the engine must exit."""


@contextmanager
def _gone_where_broken() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ServerGone from error


class ServerChannel:
    """Frames over the socket pair to the server. Owns the socket, and descriptors until their message is decoded."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._decoder = FrameDecoder(MAX_FRAME, MAX_FDS)
        self._fds: deque[int] = deque()  # descriptors of frames that are not complete yet, in order
        self._sending = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._watched: set[int] = set()

    def receive(self, timeout: float) -> list[ToEngine]:
        """The messages that have come. Waits up to `timeout` seconds for the first one. Raises ServerGone."""
        messages: list[ToEngine] = []
        for fd, _ in self._poll.poll(timeout * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            if fd in self._watched:
                continue
            for frame in self._decoder.feed(self._read()):
                fds = [self._fds.popleft() for _ in range(frame.fds)]
                messages.append(decode_to_engine(frame.payload, fds))
        return messages

    def _read(self) -> bytes:
        with _gone_where_broken():
            data = receive(self._socket, self._fds)
        if not data:
            raise ServerGone
        return data

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        """Blocks while the socket's buffer is full. Descriptors are duplicated; the caller keeps its own. Raises
        ServerGone."""
        frame = memoryview(encode(message, len(fds)))
        with self._sending, _gone_where_broken():
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
                frame = frame[self._socket.sendmsg([frame], rights) :]
            self._socket.sendall(frame)

    def refuse(self, request: int, error: DjinnError) -> None:
        """Sends the final reply of a request that ends with this error."""
        self.send(Failed(request, error.code, error.message, error.data))

    def wake(self) -> None:
        """Makes a waiting `receive` return. May be called by any thread."""
        os.eventfd_write(self._wake, 1)

    def watch(self, fd: int) -> None:
        """Makes a waiting `receive` return while `fd` is readable."""
        self._watched.add(fd)
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._watched.remove(fd)
        self._poll.unregister(fd)

    def finish(self) -> None:
        """Tells the server that the engine is done and may be killed: everything that the next engine needs is in
        place."""
        with suppress(OSError):  # the server is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
        os.close(self._wake)
        for fd in self._fds:
            os.close(fd)
