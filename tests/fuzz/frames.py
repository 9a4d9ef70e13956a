"""Frames: however a stream of bytes is cut, the decoder gives the same frames, or one documented error."""

from __future__ import annotations

from collections.abc import Iterator

from djinn_client.errors import ProtocolError
from djinn_client.protocol import HEADER, FrameDecoder, framed
from tests.fuzz.target import Target

LIMIT = 1 << 16


def seeds() -> Iterator[bytes]:
    yield framed(b"") + framed(b"x" * 100, fds=1)
    yield framed(b"abc")[:-1]
    yield HEADER.pack(b"DJ", 1, 0, (1 << 32) - 1)


def decoded(data: bytes, piece: int) -> tuple[list[tuple[bytes, int]], str]:
    """The frames, and the kind of error that ended them."""
    decoder, frames = FrameDecoder(LIMIT), []
    try:
        for start in range(0, len(data), piece):
            for frame in decoder.feed(data[start : start + piece]):
                frames.append((frame.payload, frame.fds))
                assert len(frame.payload) <= LIMIT
    except ProtocolError as error:
        return frames, type(error).__name__
    assert decoder.pending + sum(HEADER.size + len(payload) for payload, _ in frames) == len(data)
    return frames, ""


def check(data: bytes) -> None:
    if not data:
        return
    piece, stream = 1 + data[0] % 64, data[1:]
    assert decoded(stream, piece) == decoded(stream, max(1, len(stream)))


TARGET = Target(
    (
        "djinn_client.protocol.frames",
        "djinn_client.protocol",
    ),
    seeds,
    check,
)
