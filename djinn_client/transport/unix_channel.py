"""The transport to a daemon of this machine: a Unix socket, which passes descriptors."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Sequence

from djinn_client.errors import ConnectionLost
from djinn_client.protocol import MAX_FDS
from djinn_client.transport.exchange import close_all
from djinn_client.transport.steps import Steps, Wait
from djinn_client.transport.transfer import Direction, OnMoved

CHUNK = 64 << 10  # bytes asked of the socket at once
FDS_SPACE = socket.CMSG_LEN(MAX_FDS * struct.calcsize("i"))


class UnixChannel:
    passes_files = True

    def __init__(self, sock: socket.socket, path: str) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._path = path
        self._on_moved: OnMoved | None = None

    def __str__(self) -> str:
        return self._path

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def watch(self, on_moved: OnMoved | None) -> None:
        """See Channel. It is called once for a request and once for a reply: all bytes of a window pass at once."""
        self._on_moved = on_moved

    def send(self, frame: bytes, fds: Sequence[int]) -> Steps[None]:
        """Raises OSError, and not if the daemon has hung up: its reason may be waiting to be read."""
        rest: bytes | memoryview = frame
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                count = self._socket.sendmsg([rest], rights, socket.MSG_NOSIGNAL)
                if rights and self._on_moved is not None:
                    _tell_moved(self._on_moved, "sending", fds)
                if count == len(rest):
                    return
                rest = memoryview(rest)[count:]
                rights = []  # they went with the first byte
            except BlockingIOError:
                yield Wait("write", self._socket.fileno())
            except (BrokenPipeError, ConnectionResetError):
                return

    def offer(self, frame: bytes) -> bool:
        """Sends a whole frame without waiting. Returns False if it was not sent."""
        try:
            return self._socket.send(frame, socket.MSG_NOSIGNAL) == len(frame)
        except OSError:
            return False

    def receive(self) -> Steps[tuple[bytes, list[int]]]:
        """Waits for bytes, and the descriptors that came with them; b"" at the end. Raises OSError, ConnectionLost."""
        while True:
            yield Wait("read", self._socket.fileno())
            try:
                data, passed, flags, _ = self._socket.recvmsg(CHUNK, FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            fds = descriptors_in(passed) if passed else []
            if flags & socket.MSG_CTRUNC:
                close_all(fds)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise ConnectionLost(f"no room for a file descriptor: this process may open {limit}; `ulimit -n` more")
            if fds and self._on_moved is not None:
                try:
                    _tell_moved(self._on_moved, "receiving", fds)
                except BaseException:
                    close_all(fds)
                    raise
            return data, fds

    def has_input(self) -> bool:
        """Looks without waiting whether bytes or the end have come. Raises OSError."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
            return True
        except BlockingIOError:
            return False

    def close(self, *, silently: bool = False) -> None:
        self._socket.close()


def descriptors_in(passed: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of recvmsg. (socket.recv_fds takes no flags, and so no close-on-exec.)"""
    size = struct.calcsize("i")
    return [
        fd
        for level, kind, data in passed
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in struct.iter_unpack("i", data[: len(data) - len(data) % size])
    ]


def _tell_moved(on_moved: OnMoved, direction: Direction, fds: Sequence[int]) -> None:
    if nbytes := sum(os.fstat(fd).st_size for fd in fds if _is_memory(fd)):
        on_moved(direction, nbytes, nbytes)


def _is_memory(fd: int) -> bool:
    """True for a memfd, False for a file or a folder."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) >= 0
    except OSError:
        return False
