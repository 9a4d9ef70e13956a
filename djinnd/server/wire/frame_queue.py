"""The frames of one connection that wait to be sent, with their descriptors. Small frames leave together."""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Iterator, Sequence

FRAME_COST = 256  # bytes of Python objects for a frame in the queue, beside its content
_TOGETHER = 64 << 10  # bytes of small frames that one system call sends


class FrameQueue:
    """`nbytes`: of the frames. `held`: bytes of memory that they take. `send` passes descriptors; the caller closes
    them."""

    def __init__(self) -> None:
        self._frames: deque[tuple[memoryview, list[int]]] = deque()
        self.nbytes = 0
        self.held = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def fds(self) -> int:
        """Number of descriptors."""
        return sum(len(fds) for _, fds in self._frames)

    def put(self, frame: bytes, fds: Sequence[int]) -> None:
        self._frames.append((memoryview(frame), list(fds)))
        self.nbytes += len(frame)
        self.held += len(frame) + FRAME_COST

    def send(self, sock: socket.socket) -> list[int]:
        """Sends as much as one system call takes. Returns the descriptors that were sent. Raises BlockingIOError,
        OSError."""
        head, fds = self._frames[0]
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            count = sock.sendmsg([head], rights, socket.MSG_NOSIGNAL)
            self._frames[0] = (head, [])  # the descriptors went with the first byte
            self._sent(count)
            return fds
        together, size = [], 0
        for frame, more in self._frames:
            if more or size >= _TOGETHER:
                break
            together.append(frame)
            size += len(frame)
        self._sent(sock.send(b"".join(together) if len(together) > 1 else head, socket.MSG_NOSIGNAL))
        return []

    def drop(self) -> Iterator[list[int]]:
        """Empties the queue, and yields the descriptors of each frame."""
        while self._frames:
            yield self._frames.popleft()[1]
        self.nbytes = self.held = 0

    def _sent(self, count: int) -> None:
        self.nbytes -= count
        self.held -= count
        while count:
            frame, fds = self._frames[0]
            if count < len(frame):
                self._frames[0] = (frame[count:], fds)
                return
            count -= len(frame)
            self._frames.popleft()
            self.held -= FRAME_COST
