"""Counts the requests of a link that have no final reply yet, by the frames that pass in both directions.

A frame's header says how long it is, and its payload begins with the message's tag. The rest is not read. Our clients
and the daemon write the tag first; a signal of a client that does not counts as a request without a reply.
"""

from __future__ import annotations

import msgspec

from djinn_client.protocol import HEADER, Cancel, Piece, Progress, Signal

_HEAD = HEADER.size + 1  # bytes before the tag; the payload's first one says how many fields there are
_PEEK = 15  # bytes of a payload, up to the end of the longest of the tags below


def _tag(kind: type[msgspec.Struct]) -> bytes:
    """The bytes of its tag in a payload."""
    assert len(kind.__struct_fields__) < 15, "a map with more than 15 fields begins with three bytes"
    return msgspec.msgpack.encode("type") + msgspec.msgpack.encode(kind.__struct_config__.tag)


_ONE_WAY = (_tag(Signal), _tag(Cancel))
_NOT_FINAL = (_tag(Piece), _tag(Progress))


class OpenRequests:
    def __init__(self) -> None:
        self._count = 0
        self._requests = _Frames(_ONE_WAY)
        self._replies = _Frames(_NOT_FINAL)

    def sent(self, data: bytes | bytearray) -> None:
        """The client has sent these bytes to the daemon."""
        self._count += self._requests.begun(data)

    def answered(self, data: bytes) -> None:
        """The daemon has sent these bytes to the client."""
        self._count -= self._replies.begun(data)

    def __bool__(self) -> bool:
        """True while a reply is awaited, or a frame is not complete."""
        return self._count > 0 or self._requests.is_amid or self._replies.is_amid


class _Frames:
    """A stream of frames. Frames do not count if their tag is one of `others`."""

    def __init__(self, others: tuple[bytes, ...]) -> None:
        self._others = others
        self._rest: bytes | bytearray = b""  # the beginning of a frame, up to an incomplete tag
        self._missing = 0  # bytes still to come of the frame that was counted last

    @property
    def is_amid(self) -> bool:
        return bool(self._rest or self._missing)

    def begun(self, data: bytes | bytearray) -> int:
        """Takes the next bytes. Returns how many frames have begun in them."""
        if self._rest:
            data = self._rest + data
        at, size, count = self._missing, len(data), 0
        while at + HEADER.size <= size:
            length = HEADER.unpack_from(data, at)[3]
            if size - at - HEADER.size < min(length, _PEEK):
                break
            count += not data.startswith(self._others, at + _HEAD)
            at += HEADER.size + length
        self._rest, self._missing = data[at:], max(0, at - size)
        return count
