"""Records: the link takes any bytes that come inside TLS, or raises a documented error, and no window stays open."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from typing import Any, cast

from djinn_client.errors import ProtocolError, QuotaExceeded
from djinn_client.transport.remote.carrier import Carrier
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import COUNT, HEADER, Kind, Record
from djinn_client.transport.shm import new_window
from tests.fuzz.target import Target

MOST = 1 << 16  # bytes of a window


class Bytes:
    """Stands in for a TLS socket that brings these bytes, in pieces."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = data
        self._piece = piece

    def setblocking(self, flag: bool) -> None:
        pass

    def recv_into(self, memory: memoryview) -> int:
        taken = self._data[: min(self._piece, len(memory))]
        if not taken:
            raise ssl.SSLWantReadError
        memory[: len(taken)] = taken
        self._data = self._data[len(taken) :]
        return len(taken)


def window(nbytes: int) -> int:
    if nbytes > MOST:
        raise QuotaExceeded("too large")
    return new_window("fuzz", nbytes)


def seeds() -> Iterator[bytes]:
    frame = Record(Kind.FRAMES, b"frame")
    parts = [Record(Kind.WINDOW, COUNT.pack(8)), Record(Kind.PART, b"1234"), frame, Record(Kind.PART, b"5678"), frame]
    yield b"".join(record.header + bytes(record.payload) for record in parts)
    yield b"".join(record.header for record in (Record(Kind.PING), Record(Kind.CLOSE), Record(Kind.OPEN)))
    yield HEADER.pack(Kind.FRAMES, (1 << 32) - 1) + Record(Kind.ACK, COUNT.pack(1)).header


def arrived(data: bytes, piece: int) -> tuple[list[bytes], int, str]:
    """The bytes of frames with the contents of their windows, the number of records, and the error that ended them."""
    link, error = Link(window, is_sealed=True), ""
    carrier = Carrier(cast(Any, Bytes(data, piece)))
    found: list[bytes] = []
    try:
        while carrier.read(link)[0]:
            pass
    except (ProtocolError, QuotaExceeded) as raised:
        error = type(raised).__name__
    while (come := link.collect()) is not None:
        found.append(bytes(come.data))
        for fd in come.fds:
            found.append(os.pread(fd, MOST, 0))
            os.close(fd)
    link.close_windows()
    return found, link.received, error


def check(data: bytes) -> None:
    if not data:
        return
    before = os.dup(0)
    os.close(before)
    piece, stream = 1 + data[0] % 64, data[1:]
    assert arrived(stream, piece) == arrived(stream, max(1, len(stream)))
    after = os.dup(0)
    os.close(after)
    assert after == before, "a window stayed open"


TARGET = Target(
    (
        "djinn_client.transport.remote.records",
        "djinn_client.transport.remote.link",
        "djinn_client.transport.remote.carrier",
    ),
    seeds,
    check,
)
