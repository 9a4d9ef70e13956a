"""A link's Unix socket to the daemon: bytes and descriptors in both directions, without waiting."""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Sequence

from djinn_client.transport.exchange import close_all
from djinn_client.transport.unix_channel import CHUNK, FDS_SPACE, descriptors_in


class DaemonSocket:
    """Its methods raise OSError when the daemon is gone."""

    def __init__(self, path: str) -> None:
        """Connects. Raises OSError, BlockingIOError if the daemon's backlog is full."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self.queued = 0  # bytes

    def fileno(self) -> int:
        return self._socket.fileno()

    def put(self, data: bytes | bytearray, fds: Sequence[int]) -> None:
        """Queues bytes. The descriptors travel with the first of them, and belong to this object."""
        self._queue.append((memoryview(data), list(fds)))
        self.queued += len(data)

    def write(self) -> bool:
        """Sends what the socket takes. Returns True if more is queued."""
        while self._queue:
            data, fds = self._queue[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                count = self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            close_all(fds)
            self.queued -= count
            if count < len(data):
                self._queue[0] = (data[count:], [])
            else:
                self._queue.popleft()
        return False

    def read(self) -> tuple[bytes, list[int]]:
        """Bytes, and the descriptors that came with them; b"" at the end. Raises BlockingIOError."""
        data, passed, _, _ = self._socket.recvmsg(CHUNK, FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        return data, descriptors_in(passed)

    def close(self) -> None:
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()
        self._socket.close()
