"""A handler's answer: a whole body, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec

Header = tuple[bytes, bytes]

encode = msgspec.json.Encoder().encode

JSON = b"application/json"
DONE = b"data: [DONE]\n\n"


class Whole(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[Header, ...] = ()


class Framing(NamedTuple):
    """How a stream is written. `ping` is a sign of life that clients skip; b"" where the format has none."""

    content_type: bytes
    ping: bytes


SSE = Framing(b"text/event-stream; charset=utf-8", b": ping\n\n")
NDJSON = Framing(b"application/x-ndjson", b"")


class Stream(NamedTuple):
    """`events` yields bytes as they go to the client, and is closed when the client has gone."""

    events: AsyncGenerator[bytes]
    framing: Framing = SSE


Reply = Whole | Stream


def json(value: Any) -> Whole:
    return Whole(encode(value))


def event(value: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def line(value: Any) -> bytes:
    """A line of NDJSON."""
    return encode(value) + b"\n"
