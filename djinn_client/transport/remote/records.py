"""Records: the units that the two ends of a link send each other inside TLS.

    byte 0      1             5
         ┌──────┬─────────────┬─────────┐
         │ kind │ length (BE) │ payload │
         └──────┴─────────────┴─────────┘

The numbered kinds carry the link's content. Each end counts the numbered records that it has received, so that a new
TLS connection continues behind the last one that came:

    FRAMES   bytes of the protocol's frames; a frame may begin and end in the middle of a record
    WINDOW   begins a window and says how many bytes it has; its PARTs follow
    PART     the next bytes of the window
    CLOSE    the sender has closed the link

A window travels before the frame that brings it, as a descriptor comes with the first byte of a frame on a Unix socket.
The other kinds are about one TLS connection: see link.py.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct(">BI")
COUNT = struct.Struct(">Q")
OPENING = struct.Struct(">16sI")  # the link's secret, and the seconds for which the gateway keeps a link that broke
RESUMING = struct.Struct(">16sQ")  # the link's secret, and how many numbered records have come
MAX_PAYLOAD = 128 << 10  # bytes
VERSION = 1


class Kind(IntEnum):
    FRAMES = 1
    WINDOW = 2
    PART = 3
    CLOSE = 4
    OPEN = 16  # client: begins a link. Payload: VERSION, one byte
    OPENED = 17  # gateway: the link's secret and grace
    RESUME = 18  # client: continues a link
    RESUMED = 19  # gateway: how many numbered records it has received
    GONE = 20  # gateway: there is no such link
    ACK = 21  # how many numbered records have come
    PING = 22
    PONG = 23


NUMBERED = frozenset({Kind.FRAMES, Kind.WINDOW, Kind.PART, Kind.CLOSE})


class Record(NamedTuple):
    kind: Kind
    payload: bytes | memoryview = b""

    @property
    def header(self) -> bytes:
        return HEADER.pack(self.kind, len(self.payload))
