"""One non-blocking socket that carries frames both ways, and descriptors with them.

asyncio's streams cannot pass descriptors, so this stands on add_reader and add_writer, which asyncio and uvloop share.
What is to be sent waits in a queue that is counted in bytes:

    0 ───────── LOW_WATER ───────── HIGH_WATER ───────── limit
                 calm again          congested            the next frame closes the connection

Descriptors that are given to `send` belong to the connection from then on, and are closed when they are sent or cannot
be. Frames that are sent in one turn of the loop leave together.

What comes is handed out FRAMES_A_TURN at a time: after so many the other connections have their turn, and nothing more
is read until the rest has been handed out.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from djinn_client.errors import ProtocolError
from djinn_client.protocol import MAX_FDS, FrameDecoder

log = logging.getLogger("djinnd.server")

HIGH_WATER = 256 << 10
LOW_WATER = 64 << 10
LINGER = 5.0  # seconds that a closing connection has to take what waits for it
READS_A_TURN = 2  # the second finds nothing, as a rule
FRAMES_A_TURN = 16  # of a flood of small ones some tenth of a millisecond's work
_TOGETHER = 64 << 10  # bytes of small frames that leave in one call

_read_buffer = bytearray(32 << 10)  # shared: what is read is decoded before anything else reads. Small: a turn's work
_read_view = memoryview(_read_buffer)


class Events(Protocol):
    """What a connection's owner is told. After `closed` it is told nothing more."""

    def frame(self, payload: bytes, fds: list[int]) -> None:
        """The descriptors are the owner's now."""

    def broken(self, error: ProtocolError) -> None:
        """The bytes are not frames, and nothing more is read. The owner closes, after a last word if it likes."""

    def congested(self, is_congested: bool) -> None: ...

    def closed(self) -> None:
        """In a turn of the loop of its own."""


class Connection:
    """`accept_fds`: whether the peer may send descriptors; where it may not, the kernel throws them away."""

    def __init__(
        self, sock: socket.socket, events: Events, frame_limit: int, output_limit: int, accept_fds: bool = False
    ) -> None:
        sock.setblocking(False)
        self.output_limit = output_limit
        self.congested = False
        self._socket = sock
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(frame_limit)
        self._accept_fds = accept_fds
        self._received_fds: deque[int] = deque()
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued = 0
        self._flushing = False  # a flush is due, or the socket is watched for room
        self._writing = False
        self._closing: asyncio.TimerHandle | None = None
        self._is_behind = False  # whole frames may wait in the decoder; the socket is not read meanwhile
        self._is_read = True  # the socket is watched for what comes
        self._reads_on = False  # in the next turn, whatever is said of the socket
        self._loop.add_reader(sock, self._readable)

    @property
    def is_open(self) -> bool:
        """Still takes frames to send."""
        return self._socket.fileno() >= 0 and self._closing is None

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def queued_bytes(self) -> int:
        return self._queued

    @property
    def queued_fds(self) -> int:
        return sum(len(fds) for _, fds in self._queue)

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queues the frame; does nothing on a connection that is closed or closing."""
        if not self.is_open or self._overflows():
            close_fds(fds)
            return
        self._queue.append((memoryview(frame), list(fds)))
        self._queued += len(frame)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        if self._queued > HIGH_WATER and not self.congested:
            self.congested = True
            self._events.congested(True)

    def flush(self) -> None:
        """What is queued leaves now, before whatever else this turn of the loop has to do, if the socket has room."""
        if self._queue and not self._writing:
            self._flush()

    def _overflows(self) -> bool:
        if self._queued <= self.output_limit:
            return False
        log.warning("client_too_slow fd=%d queued=%d limit=%d", self.fd, self._queued, self.output_limit)
        self.close()
        return True

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            while self._queue:
                self._sent(self._send_some())
        except BlockingIOError:
            self._watch_for_room(True)
        except OSError as error:
            log.debug("send_failed fd=%d error=%s", self.fd, error)
            self.close()
            return
        else:
            self._watch_for_room(False)
            if self._closing:
                self.close()
                return
        if self.congested and self._queued < LOW_WATER:
            self.congested = False
            self._events.congested(False)

    def _send_some(self) -> int:
        head, fds = self._queue[0]
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            count = self._socket.sendmsg([head], rights, socket.MSG_NOSIGNAL)
            self._queue[0] = (head, [])  # they went with the first byte
            close_fds(fds)
            return count
        together, size = [], 0
        for frame, fds in self._queue:
            if fds or size >= _TOGETHER:
                break
            together.append(frame)
            size += len(frame)
        return self._socket.send(b"".join(together) if len(together) > 1 else head, socket.MSG_NOSIGNAL)

    def _sent(self, count: int) -> None:
        self._queued -= count
        while count:
            frame, fds = self._queue[0]
            if count < len(frame):
                self._queue[0] = (frame[count:], fds)
                return
            count -= len(frame)
            self._queue.popleft()

    def _watch_for_room(self, watch: bool) -> None:
        if watch and not self._writing:
            self._loop.add_writer(self._socket, self._flush)
        elif self._writing and not watch:
            self._loop.remove_writer(self._socket)
        self._flushing = self._writing = watch

    # --- in ---------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Until there is nothing more, be it in turns: that a peer has gone and has left something unread, epoll says
        as an error, and of that uvloop calls once."""
        for _ in range(READS_A_TURN):
            if not self._read():
                return
        if not self._reads_on:
            self._reads_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._reads_on = False
        self._readable()

    def _read(self) -> bool:
        """→ whether there may be more."""
        if not self._is_read:
            return False
        try:
            count = self._receive()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            log.debug("receive_failed fd=%d error=%s", self.fd, error)
            count = 0
        if count == 0:
            if self._decoder.pending:
                log.info("frame_truncated fd=%d bytes=%d", self.fd, self._decoder.pending)
            self.close()
            return False
        self._hand_out(_read_view[:count])
        return self._is_read

    def _hand_out(self, data: memoryview) -> None:
        if not self.is_open:
            return
        handed_out = 0
        try:
            for frame in islice(self._decoder.feed(data), FRAMES_A_TURN):
                handed_out += 1
                self._events.frame(frame.payload, self._take_fds(frame.fds))
                if not self.is_open:
                    return
            if handed_out == FRAMES_A_TURN:
                self._fall_behind()
                return
            self._catch_up()
            if not self._decoder.pending:  # they come with a frame's first byte, and there is none that began
                close_fds(self._received_fds)
                self._received_fds.clear()
            if len(self._received_fds) > MAX_FDS:  # more than the one unfinished frame may bring
                raise ProtocolError(f"{len(self._received_fds)} descriptors came that no frame announced")
        except ProtocolError as error:
            self._read_no_more()
            self._events.broken(error)
        except BaseException:  # ours; a panic in Rust code is no Exception. What follows is not to wait for ever
            log.exception("frame_failed fd=%d", self.fd)
            self.close()

    def _fall_behind(self) -> None:
        if not self._is_behind:
            self._is_behind = True
            self._read_no_more()
        self._loop.call_soon(self._hand_out, _read_view[:0])

    def _catch_up(self) -> None:
        if self._is_behind:
            self._is_behind = False
            self._is_read = True
            self._loop.add_reader(self._socket, self._readable)

    def _read_no_more(self) -> None:
        self._is_read = False
        self._loop.remove_reader(self._socket)

    def _receive(self) -> int:
        if not self._accept_fds:
            return self._socket.recv_into(_read_buffer)
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        count, ancillary, _, _ = self._socket.recvmsg_into([_read_buffer], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._received_fds.extend(array.array("i", data[: len(data) // 4 * 4]))
        return count

    def _take_fds(self, announced: int) -> list[int]:
        """Descriptors come with their frame's first byte, so they are here before the frame is whole."""
        return [self._received_fds.popleft() for _ in range(min(announced, len(self._received_fds)))]

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """At once; what waits is lost."""
        if self._socket.fileno() < 0:
            return
        self._read_no_more()
        self._loop.remove_writer(self._socket)
        if self._closing:
            self._closing.cancel()
        self._socket.close()
        for _, fds in self._queue:
            close_fds(fds)
        self._queue.clear()
        self._queued = 0
        close_fds(self._received_fds)
        self._received_fds.clear()
        self._loop.call_soon(self._events.closed)  # later: whoever closes may be in the middle of something

    def close_when_sent(self) -> None:
        """Takes nothing more either way, and closes when what waits has left, or after LINGER seconds."""
        if not self.is_open:
            return
        self._read_no_more()
        self._closing = self._loop.call_later(LINGER, self.close)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
