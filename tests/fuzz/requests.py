"""Requests: every type of message that a client may send, with any bytes in the place of its fields, decodes to a
message or to a ProtocolError. A decoded message is valid or refused, and can be encoded again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

from djinn_client.errors import DjinnError, ProtocolError
from djinn_client.protocol import ClientMessage, decode_request, encode, request_id_of, union_of
from tests.fuzz.messages import hostile_message, seed_messages, types_of
from tests.fuzz.target import Target

KINDS = types_of(union_of(*get_args(ClientMessage)))


def seeds() -> Iterator[bytes]:
    yield from seed_messages(KINDS)


def check(data: bytes) -> None:
    for payload in (data, hostile_message(data, KINDS)):
        number = request_id_of(payload)
        assert number is None or isinstance(number, int)
        try:
            message = decode_request(payload)
        except ProtocolError:
            continue
        for part in (message, getattr(message, "sampling", None), getattr(message, "placing", None)):
            validate = getattr(part, "validate", None)
            if validate is not None:
                with suppress(DjinnError):
                    validate()
        encode(message)


TARGET = Target(
    (
        "djinn_client.protocol.frames",
        "djinn_client.protocol",
        "djinn_client.protocol.fields.sampling",
        "djinn_client.protocol.fields.placing",
    ),
    seeds,
    check,
)
