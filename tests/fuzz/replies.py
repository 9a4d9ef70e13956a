"""Replies: a client that speaks with something hostile in the place of the daemon decodes messages or raises
ProtocolError, and makes an error of every failure."""

from __future__ import annotations

from collections.abc import Iterator

from djinn_client.errors import DjinnError, ProtocolError, from_code
from djinn_client.protocol import Failure, ServerMessage, decode_reply, union_of
from tests.fuzz.messages import hostile_message, seed_messages, types_of
from tests.fuzz.target import Target

KINDS = types_of(union_of(ServerMessage))


def seeds() -> Iterator[bytes]:
    yield from seed_messages(KINDS)


def check(data: bytes) -> None:
    for payload in (data, hostile_message(data, KINDS)):
        try:
            message = decode_reply(payload)
        except ProtocolError:
            continue
        if isinstance(message, Failure):
            assert isinstance(from_code(message.code, message.message, message.data), DjinnError)


TARGET = Target(("djinn_client.protocol.frames", "djinn_client.protocol", "djinn_client.errors"), seeds, check)
