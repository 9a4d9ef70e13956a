"""One non-blocking socket that carries frames both ways, with descriptors.

asyncio's streams cannot pass descriptors. So a FrameConnection uses add_reader and add_writer, which asyncio and uvloop
have in common.

Frames to be sent wait in a queue, measured in bytes:

    0 ───────── LOW_WATER ───────── HIGH_WATER ───────── limit
                 calm again          congested            the next frame closes the connection

A client's connection has a Traffic, which bounds the memory of all connections of its user. A large frame waits until
the Traffic has room for it. A frame that is not complete in time breaks the connection. While the connection is
congested, its owner may postpone frames: then nothing more is read until it is calm.

Descriptors passed to `send` belong to the connection, which closes them after they are sent or cannot be. Frames sent
in one turn of the loop leave together.

In one turn of the loop at most FRAMES_A_TURN received frames are delivered. Then other connections have their turn, and
the socket is not read until the rest is delivered.
"""

from __future__ import annotations

import array
import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from djinn_client.errors import ProtocolError
from djinn_client.protocol import MAX_FDS, FrameDecoder
from djinnd.server.system.closer import close_fds
from djinnd.server.wire.frame_queue import FrameQueue
from djinnd.server.wire.traffic import SMALL, Traffic

log = logging.getLogger("djinnd.server")

HIGH_WATER = 256 << 10
LOW_WATER = 64 << 10
LINGER = 5.0  # seconds that a closing connection gets to send its queue
READS_A_TURN = 2  # the second read finds nothing, as a rule
FRAMES_A_TURN = 16  # for small frames about a tenth of a millisecond of work
_FDS_SPACE = socket.CMSG_SPACE(253 * array.array("i").itemsize)  # the most in one message: none is dropped

_read_buffer = bytearray(32 << 10)  # shared: its content is decoded before the next read. Small: one turn's work
_read_view = memoryview(_read_buffer)


class ConnectionEvents(Protocol):
    """Calls to a connection's owner. None follows after `closed`."""

    def frame(self, payload: bytes, fds: list[int]) -> bool | None:
        """Delivers a frame; its descriptors now belong to the owner. Returns False to postpone the frame: it is
        delivered again when the connection is calm."""

    def broken(self, error: ProtocolError) -> None:
        """The peer has broken the protocol; nothing more is read. The owner may send a last frame, and then closes."""

    def congested(self, is_congested: bool) -> None: ...

    def closed(self) -> None:
        """The connection is closed. Called in a turn of the loop of its own."""


class FrameConnection:
    """One socket with its queue of frames.

    - `accept_fds`: the peer may send descriptors. If not, the kernel drops them.
    - `traffic`: the accounts of the client's user; None if the peer is a process of the daemon.
    - `frame_seconds`: the time in which a frame must be complete.
    """

    def __init__(
        self,
        sock: socket.socket,
        events: ConnectionEvents,
        frame_limit: int,
        output_limit: int,
        accept_fds: bool = False,
        traffic: Traffic | None = None,
        frame_seconds: float = 0.0,
    ) -> None:
        sock.setblocking(False)
        self.output_limit = output_limit
        self.congested = False
        self._traffic = traffic
        self._frame_seconds = frame_seconds
        self._socket = sock
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(frame_limit)
        self._accept_fds = accept_fds
        self._received_fds: deque[int] = deque()
        self._queue = FrameQueue()
        self._flushing = False  # a flush is scheduled, or the socket is watched until it is writable
        self._writing = False
        self._closing: asyncio.TimerHandle | None = None
        self._charged_in = 0  # bytes of the frame that is being received or delivered
        self._charged_out = 0  # bytes of queued replies
        self._deadline: asyncio.TimerHandle | None = None  # when the unfinished frame must be complete
        self._is_deaf = False  # reads nothing more, ever
        self._is_behind = False  # decoded frames are still to be delivered; the socket is not read meanwhile
        self._waits_for_room = False  # a large frame waits for Traffic; the socket is not read meanwhile
        self._postponed: tuple[bytes, list[int]] | None = None  # the socket is not read meanwhile
        self._is_read = True  # the socket is watched for input
        self._reads_on = False  # reads in the next turn, even if epoll reports nothing
        self._loop.add_reader(sock, self._readable)

    @property
    def is_open(self) -> bool:
        """True if frames can be sent."""
        return self._socket.fileno() >= 0 and self._closing is None

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def limit_frames(self, nbytes: int) -> None:
        """Sets the size that a received frame may have from now on."""
        self._decoder.limit = nbytes

    @property
    def queued_bytes(self) -> int:
        return self._queue.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the queued frames take."""
        return self._queue.held

    @property
    def queued_fds(self) -> int:
        return self._queue.fds

    # --- output -------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queues the frame. Does nothing if the connection is closed or closing."""
        if not self.is_open or (self._queue.held > self.output_limit and self._overflows()):
            self._close_own(fds)
            return
        self._queue.put(frame, fds)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        held = self._queue.held
        if held > HIGH_WATER and not self.congested:
            self.congested = True
            self._events.congested(True)
        if self._traffic is not None and held > self._charged_out + SMALL:
            self._charge_out(held)

    def flush(self) -> None:
        """Sends the queue at once, before the other work of this turn of the loop, as far as the socket has room."""
        if self._queue and not self._writing:
            self._flush()

    def _overflows(self) -> bool:
        log.warning("client_too_slow fd=%d held=%d limit=%d", self.fd, self.held_bytes, self.output_limit)
        self.close()
        return True

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            while self._queue:
                if fds := self._queue.send(self._socket):
                    self._close_own(fds)
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
        held = self._queue.held
        if self._charged_out and held < max(self._charged_out - SMALL, SMALL):
            self._charge_out(held)
        if self.congested and held < LOW_WATER:
            self.congested = False
            self._events.congested(False)
            if self._postponed is not None:
                self._loop.call_soon(self._hand_out, _read_view[:0])

    def _charge_out(self, held: int) -> None:
        """Charges queued replies in steps of SMALL bytes, so that the accounts change rarely."""
        assert self._traffic is not None
        was, self._charged_out = self._charged_out, held if held > SMALL else 0
        self._traffic.replies(self, was, self._charged_out)

    def _watch_for_room(self, watch: bool) -> None:
        if watch and not self._writing:
            self._loop.add_writer(self._socket, self._flush)
        elif self._writing and not watch:
            self._loop.remove_writer(self._socket)
        self._flushing = self._writing = watch

    # --- input --------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Reads until the socket is empty, in several turns if necessary. If a peer has gone and left bytes unread,
        epoll reports an error, for which uvloop calls only once."""
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
        """Reads once. Returns True if there may be more."""
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
            if self._postponed is not None and not self._deliver(*self._postponed):
                return
            for frame in islice(self._decoder.feed(data), FRAMES_A_TURN):
                handed_out += 1
                if not self._deliver(frame.payload, self._take_fds(frame.fds)):
                    return
            self._is_behind = handed_out == FRAMES_A_TURN
            if self._is_behind:
                self._loop.call_soon(self._hand_out, _read_view[:0])
            else:
                self._expect_rest()
            self._watch_input()
        except ProtocolError as error:
            self._break(error)
        except BaseException:  # ours, or a panic of Rust code, which is no Exception: the client must not hang
            log.exception("frame_failed fd=%d", self.fd)
            self.close()

    def _deliver(self, payload: bytes, fds: list[int]) -> bool:
        """Passes a frame to the owner. Returns True if the next frame may follow."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._events.frame(payload, fds) is False:
            self._postponed = (payload, fds)
            self._watch_input()
            return False
        self._postponed = None
        if self._charged_in and self._traffic is not None:
            self._traffic.give_back(self.take_charge())
        return self.is_open

    def change_traffic(self, traffic: Traffic) -> None:
        """Charges the connection to another principal from now on. Before Hello only small frames are allowed, so only
        descriptors have been charged."""
        assert self._traffic is not None and not (self._charged_in or self._charged_out or self._waits_for_room)
        self._traffic.taken(len(self._received_fds))
        self._traffic = traffic
        self._count_received(len(self._received_fds))

    def take_charge(self) -> int:
        """Returns the bytes charged for the frame that is being delivered. The caller now has to give them back."""
        charged, self._charged_in = self._charged_in, 0
        return charged

    def _expect_rest(self) -> None:
        """Prepares for the rest of an unfinished frame, if the decoder has one. Raises ProtocolError."""
        if not self._decoder.pending:  # descriptors come with the first byte of a frame, and no frame has begun
            self._drop_received()
            return
        if len(self._received_fds) > MAX_FDS:  # more than one unfinished frame may bring
            raise ProtocolError(f"{len(self._received_fds)} descriptors came that no frame announced")
        if self._traffic is None:
            return
        announced = self._decoder.announced
        if announced > SMALL and not self._charged_in:
            self._waits_for_room = not self._traffic.take(self, announced)
            self._charged_in = 0 if self._waits_for_room else announced
        if self._deadline is None and not self._waits_for_room:
            self._deadline = self._loop.call_later(self._frame_seconds, self._too_late)

    def room_made(self) -> None:
        """Called when Traffic has charged the frame that has waited for room."""
        self._waits_for_room = False
        self._charged_in = self._decoder.announced
        self._deadline = self._loop.call_later(self._frame_seconds, self._too_late)
        self._watch_input()

    def _too_late(self) -> None:
        self._deadline = None
        self._break(ProtocolError(f"a frame was not complete {self._frame_seconds:g} s after its first byte"))

    def _break(self, error: ProtocolError) -> None:
        self._stop_reading()
        self._events.broken(error)

    def _watch_input(self) -> None:
        wanted = not (self._is_deaf or self._is_behind or self._waits_for_room or self._postponed is not None)
        if wanted and not self._is_read:
            self._loop.add_reader(self._socket, self._readable)
        elif self._is_read and not wanted:
            self._loop.remove_reader(self._socket)
        self._is_read = wanted

    def _stop_reading(self) -> None:
        """Ends reading for good, and drops a frame that is incomplete."""
        self._is_deaf = True
        self._watch_input()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._traffic is not None:
            self._traffic.leave(self)
            if self._charged_in:
                self._traffic.give_back(self.take_charge())

    def _receive(self) -> int:
        if not self._accept_fds:
            return self._socket.recv_into(_read_buffer)
        count, ancillary, _, _ = self._socket.recvmsg_into([_read_buffer], _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i", data[: len(data) // 4 * 4])
                self._received_fds.extend(fds)
                self._count_received(len(fds))
        return count

    def _count_received(self, count: int) -> None:
        if self._traffic is not None and not self._traffic.came(count):
            self._loop.call_soon(self._too_many_fds)

    def _close_own(self, fds: Sequence[int]) -> None:
        """Closes descriptors of the daemon that were sent, or were to be sent."""
        if self._traffic is None:
            close_fds(fds)
        else:
            self._traffic.discard(fds)

    def _too_many_fds(self) -> None:
        if self.is_open:
            self._break(ProtocolError("more descriptors came than may be open: hand over fewer at once"))

    def _drop_received(self) -> None:
        if self._received_fds:
            self._drop_fds(list(self._received_fds))
            self._received_fds.clear()

    def _drop_fds(self, fds: Sequence[int]) -> None:
        """Closes descriptors that the peer has sent."""
        if self._traffic is None:
            close_fds(fds)
        else:
            self._traffic.drop(fds)

    def _take_fds(self, announced: int) -> list[int]:
        """Returns the descriptors of a complete frame. They came with its first byte, so all of them are here."""
        return [self._received_fds.popleft() for _ in range(min(announced, len(self._received_fds)))]

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes at once; queued frames are lost."""
        if self._socket.fileno() < 0:
            return
        self._stop_reading()
        self._loop.remove_writer(self._socket)
        if self._closing:
            self._closing.cancel()
        for fds in self._queue.drop():
            self._close_own(fds)
        if self._postponed is not None:
            self._drop_fds(self._postponed[1])
        self._drop_received()
        if self._traffic is None:
            self._socket.close()
        else:
            self._traffic.hang_up(self._socket)
            self._charge_out(0)
        self._loop.call_soon(self._events.closed)  # in a later turn: the caller may be in the middle of its own work

    def close_when_sent(self) -> None:
        """Stops reading and queuing, and closes when the queue has been sent, or after LINGER seconds."""
        if not self.is_open:
            return
        self._stop_reading()
        self._closing = self._loop.call_later(LINGER, self.close)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
