"""Keeps responses: the daemon has a record of each, with all that is needed to continue it.

The record names the session that has answered, so that the next call finds it. The record's body has the response and
the transcript up to it: a response can be continued whatever becomes of others.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from djinn_client.errors import NotFound, SessionNotFound
from djinn_client.protocol import Done, DropRecord, GetRecord, KeepRecord, Record, RecordKept
from djinnd.gateway.daemon.link import Link
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import encode
from djinnd.gateway.responses.items import Item, Messages

_ID = re.compile(r"resp_[\w-]{1,56}")
_CONVERSATION = re.compile(r"[\w.:-]{1,56}")


class Stored(msgspec.Struct):
    response: dict[str, Any]
    input: list[Item]
    transcript: Messages  # with the answer, and without the instructions


_decoder = msgspec.json.Decoder(Stored)


async def find(link: Link, response: str) -> Stored:
    """Raises HttpError where the caller has none of this id."""
    if not _ID.fullmatch(response):
        raise _unknown(response)
    stored = await read(link, response)
    if stored is None:
        raise _unknown(response)
    return stored


def conversation_record(conversation: str) -> str:
    """The name of its record. Raises HttpError."""
    if not _CONVERSATION.fullmatch(conversation):
        told = "a conversation's id has at most 56 letters, digits, and _ . : -"
        raise HttpError(400, told, param="conversation")
    return f"conv:{conversation}"


async def keep(link: Link, name: str, model: str, session: str, stored: Stored) -> None:
    """`session` has answered. Without it, or if it is gone already, the record has only the body."""
    body = encode(stored)
    try:
        await link.call(KeepRecord(id=0, session=session, model=model, record=name, body=body), RecordKept)
    except SessionNotFound:
        await link.call(KeepRecord(id=0, model=model, record=name, body=body), RecordKept)


async def drop(link: Link, response: str) -> None:
    """Raises HttpError where the caller has none of this id."""
    await find(link, response)
    await link.call(DropRecord(id=0, record=response), Done)


async def read(link: Link, name: str) -> Stored | None:
    """None: there is no such record, or it is not the gateway's."""
    try:
        return _decoder.decode((await link.call(GetRecord(id=0, record=name), Record)).body)
    except (NotFound, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _unknown(response: str) -> HttpError:
    told = f"Response with id '{response[:64]}' not found: it was not stored, was deleted, or has expired"
    return HttpError(404, told, code="not_found")
