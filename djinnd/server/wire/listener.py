"""Accepts all waiting connections. Pauses when descriptors run out, instead of spinning."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("djinnd.server")

PAUSE = 1.0  # seconds
_AT_ONCE = 64  # connections accepted in one turn of the loop
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Calls `accept` with each connection. Does not own the listening socket."""

    def __init__(self, sock: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Stops accepting connections."""
        self._loop.remove_reader(self._socket)
        if self._paused is not None:
            self._paused.cancel()

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("accept_paused error=%s seconds=%g", error, PAUSE)
                self._loop.remove_reader(self._socket)
                self._paused = self._loop.call_later(PAUSE, self._resume)
                return
            self._accept(sock)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket, self._readable)
