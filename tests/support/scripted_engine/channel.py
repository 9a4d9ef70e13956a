"""The scripted engine's end of its socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

from djinn_client.protocol import FrameDecoder
from djinn_client.transport.shm import new_window
from djinnd import messages
from djinnd.messages import MAX_FRAME


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._decoder = FrameDecoder(MAX_FRAME)

    def receive(self) -> Iterator[messages.ToEngine]:
        """The messages that have come. Exits if the server is gone."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise SystemExit(0)
        for frame in self._decoder.feed(data):
            yield messages.decode_to_engine(frame.payload)

    def send(self, message: messages.FromEngine, fds: tuple[int, ...] = ()) -> None:
        frame = messages.encode(message, len(fds))
        if fds:
            sent = socket.send_fds(self.socket, [frame], list(fds))
            frame = frame[sent:]
        self.socket.sendall(frame)

    def send_window(self, message: messages.FromEngine, data: bytes) -> None:
        fd = new_window("djinnd-scripted", len(data))
        os.pwrite(fd, data, 0)
        self.send(message, (fd,))
        os.close(fd)

    def fail(self, request: int, code: str, why: str, **data: Any) -> None:
        self.send(messages.Failed(request, code, why, data))

    def refuse(self, request: int, why: str, needed: int) -> None:
        self.fail(request, "out_of_memory", why, needed=needed)
