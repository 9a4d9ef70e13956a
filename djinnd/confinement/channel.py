"""Channel: a confined process's end of its socket pair to the server. Blocking, one frame after another."""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from djinn_client.protocol import MAX_FDS, FrameDecoder

_READ = 1 << 18
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

Heard = TypeVar("Heard")
Said = TypeVar("Said")


class ConfinedChannel(Generic[Heard, Said]):
    """Sends and receives messages. decode, encode: of the process's protocol. max_frame: most bytes of a message from
    the server."""

    def __init__(
        self,
        sock: socket.socket,
        max_frame: int,
        decode: Callable[[bytes], Heard],
        encode: Callable[[Said], bytes],
    ) -> None:
        self._socket = sock
        self._decoder = FrameDecoder(max_frame)
        self._decode = decode
        self._encode = encode
        self._fds: deque[int] = deque()

    def messages(self) -> Iterator[tuple[Heard, list[int]]]:
        """Yields messages with their descriptors, until the server closes the socket."""
        while True:
            data = receive(self._socket, self._fds)
            if not data:
                return
            for frame in self._decoder.feed(data):
                yield self._decode(frame.payload), [self._fds.popleft() for _ in range(frame.fds)]

    def send(self, message: Said) -> None:
        """If the server is gone, does nothing, and `messages` ends."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(self._encode(message))


def receive(sock: socket.socket, fds: deque[int]) -> bytes:
    """Reads from the socket once, and adds the descriptors that come to `fds`. Returns b"" if the other end has been
    closed."""
    try:
        data, ancillary, _, _ = sock.recvmsg(_READ, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the other process was killed before it had read everything
        return b""
    for level, kind, rights in ancillary:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS), (level, kind)
        fds.extend(array.array("i", rights))
    return data
