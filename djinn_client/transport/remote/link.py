"""One end of a link, without I/O: a connection between a client and a daemon that outlives its TLS connections.

    client ── TLS connection 1 ── broken
           ── TLS connection 2 ───────► gateway ── Unix socket ──► daemon

Every numbered record is kept until the other end acknowledges it. When a TLS connection breaks, the client makes
another one. Both ends then say how many numbered records have come, and send the rest again. So each record arrives
once, in order, and the daemon's connection does not notice.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from djinn_client.errors import OutOfMemory, ProtocolError
from djinn_client.transport.exchange import close_all
from djinn_client.transport.remote.records import COUNT, MAX_PAYLOAD, NUMBERED, Kind, Record
from djinn_client.transport.shm import new_window
from djinn_client.transport.transfer import Transfer

ACK_BYTES = 256 << 10  # received bytes, after which they are acknowledged
ACK_RECORDS = 64  # received records, after which they are acknowledged
MAX_WINDOWS = 240  # that wait for their frame: as many descriptors as a frame may bring

MakeWindow = Callable[[int], int]


class Arrived(NamedTuple):
    """Bytes of frames, and the descriptors of the windows that came right before them."""

    data: bytearray
    fds: list[int]


class Link:
    """`make_window(nbytes)` makes the memory of an announced window, which need not be reserved, and returns its
    descriptor; it may raise a DjinnError. `is_sealed`: a complete window is sealed against writing."""

    def __init__(self, make_window: MakeWindow | None = None, is_sealed: bool = False) -> None:
        self.is_closed_by_peer = False
        self.received = 0  # numbered records that have come
        self.held = 0  # bytes of frames that are kept
        self.sending, self.receiving = Transfer(), Transfer()
        self._make_window = make_window or _own_window
        self._is_sealed = is_sealed
        self._sent: deque[Record] = deque()  # numbered, sent on this TLS connection or an earlier one
        self._acked = 0  # number of the first record of _sent
        self._queue: deque[Record] = deque()  # numbered, still to be sent
        self._control: deque[Record] = deque()  # not numbered: sent first, and lost with the TLS connection
        self._since_ack = [0, 0]  # records and bytes that have come since the last acknowledgement
        self._arrived: deque[Arrived] = deque()
        self._windows: list[int] = []  # complete, before their frame
        self._filling: _Filling | None = None

    # --- output -------------------------------------------------------------------------------------------------------

    def put_frames(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), MAX_PAYLOAD):
            self._queue.append(Record(Kind.FRAMES, view[start : start + MAX_PAYLOAD]))
        self.held += len(data)

    def put_window(self, memory: memoryview) -> None:
        """The memory is read until its last byte is acknowledged, and must not change before."""
        self.sending.total += len(memory)
        self._queue.append(Record(Kind.WINDOW, COUNT.pack(len(memory))))
        for start in range(0, len(memory), MAX_PAYLOAD):
            self._queue.append(Record(Kind.PART, memory[start : start + MAX_PAYLOAD]))

    @property
    def has_unsent_windows(self) -> bool:
        return any(record.kind in (Kind.WINDOW, Kind.PART) for record in self._queue)

    def put(self, kind: Kind, payload: bytes = b"") -> None:
        (self._queue if kind in NUMBERED else self._control).append(Record(kind, payload))

    def next(self) -> Record | None:
        """The next record to send. A numbered one is kept."""
        if self._control:
            return self._control.popleft()
        if not self._queue:
            return None
        record = self._queue.popleft()
        self._sent.append(record)
        return record

    @property
    def has_output(self) -> bool:
        return bool(self._control or self._queue)

    def resume(self, received: int) -> None:
        """Begins a new TLS connection. The other end has received `received` numbered records; the rest is sent again.
        Raises ProtocolError."""
        self._acknowledged(received)
        self._queue.extendleft(reversed(self._sent))
        self._sent.clear()
        self._control.clear()

    # --- input --------------------------------------------------------------------------------------------------------

    def take(self, kind: Kind, payload: bytes | memoryview) -> Record | None:
        """Takes a record that has come. The caller may change its `payload` afterwards. Returns a record that is about
        the TLS connection, for the owner. Raises ProtocolError, OutOfMemory, and the error of `make_window`."""
        if kind in NUMBERED:
            self.received += 1
            self._count(len(payload))
        match kind:
            case Kind.FRAMES:
                if self._windows or not self._arrived:
                    self._arrived.append(Arrived(bytearray(), self._windows))
                    self._windows = []
                self._arrived[-1].data.extend(payload)
            case Kind.WINDOW:
                self._begin_window(payload)
            case Kind.PART:
                self._fill(payload)
            case Kind.CLOSE:
                self.is_closed_by_peer = True
            case Kind.ACK:
                self._acknowledged(_count_in(payload))
            case Kind.PING:
                self.put(Kind.PONG)
            case Kind.PONG:
                pass
            case _:
                return Record(kind, payload)
        return None

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def collect(self) -> Arrived | None:
        """The next frames that have come, and their windows; None if there are none. The caller owns the
        descriptors."""
        return self._arrived.popleft() if self._arrived else None

    def close_windows(self) -> None:
        """Frees the windows that no frame has taken, and those that are not sent. The link has ended."""
        self._queue.clear()
        self._sent.clear()
        close_all(self._windows)
        self._windows = []
        if self._filling is not None:
            os.close(self._filling.fd)
            self._filling = None

    def _begin_window(self, payload: bytes | memoryview) -> None:
        nbytes = _count_in(payload)
        if self._filling is not None:
            raise ProtocolError("a window was announced before the one before it was complete")
        if nbytes < 1 or len(self._windows) >= MAX_WINDOWS:
            told = f"window {len(self._windows) + 1} of a frame has {nbytes:,} bytes"
            raise ProtocolError(f"{told}: a frame may bring {MAX_WINDOWS}, and none is empty")
        self._filling = _Filling(self._make_window(nbytes), nbytes)
        self.receiving.total += nbytes

    def _fill(self, part: bytes | memoryview) -> None:
        if self._filling is None:
            raise ProtocolError("a part of a window came, but no window was announced")
        try:
            is_complete = self._filling.write(part)
        except OutOfMemory:
            os.close(self._filling.fd)
            self._filling = None
            raise
        self.receiving.done += len(part)
        if is_complete:
            self._window_complete()

    def _window_complete(self) -> None:
        assert self._filling is not None
        fd = self._filling.fd
        self._filling = None
        self._windows.append(fd)
        if self._is_sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        self._acknowledge()  # so that the sender frees it

    def _count(self, nbytes: int) -> None:
        self._since_ack[0] += 1
        self._since_ack[1] += nbytes
        if self._since_ack[0] >= ACK_RECORDS or self._since_ack[1] >= ACK_BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._since_ack = [0, 0]
        self.put(Kind.ACK, COUNT.pack(self.received))

    def _acknowledged(self, count: int) -> None:
        if not self._acked <= count <= self._acked + len(self._sent):
            raise ProtocolError(f"{count:,} records were acknowledged, of {self._acked + len(self._sent):,}")
        while self._acked < count:
            record = self._sent.popleft()
            self._acked += 1
            if record.kind is Kind.FRAMES:
                self.held -= len(record.payload)
            elif record.kind is Kind.PART:
                self.sending.done += len(record.payload)


class _Filling:
    """A window that is being received. Its parts are written with pwrite: the copy costs less than the faults of a new
    mapping, whose pages are also cleared first."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self._nbytes = nbytes
        self._done = 0  # bytes of parts that have come

    def write(self, part: bytes | memoryview) -> bool:
        """Returns True if the window is complete. Raises ProtocolError, OutOfMemory."""
        if len(part) > self._nbytes - self._done:
            raise ProtocolError(f"the parts of a window have more than its {self._nbytes:,} bytes")
        rest = memoryview(part)
        while rest:
            try:
                count = os.pwrite(self.fd, rest, self._done)
            except OSError as error:
                told = f"no memory is left for a window of {self._nbytes:,} bytes, {self._done:,} of which have come"
                raise OutOfMemory(f"{told}: {error.strerror}", bytes=self._nbytes) from error
            rest = rest[count:]
            self._done += count
        return self._done == self._nbytes


def _own_window(nbytes: int) -> int:
    """Raises OutOfMemory: an OSError would mean that the TLS connection is broken."""
    try:
        return new_window("djinn-remote", nbytes, is_reserved=False)
    except OSError as error:
        raise OutOfMemory(
            f"this machine has no memory for {nbytes:,} bytes that the daemon sends: {error.strerror}", bytes=nbytes
        ) from error


def _count_in(payload: bytes | memoryview) -> int:
    if len(payload) != COUNT.size:
        raise ProtocolError(f"a count of {len(payload)} bytes; it has {COUNT.size}")
    count: int = COUNT.unpack(payload)[0]
    return count
