"""Vectors of embeddings as JSON, a row at a time: all at once would hold up every stream for a second or more."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import msgspec

from djinn_client.protocol import Embedded
from djinnd.gateway.http.replies import encode


def rows_of(reply: Embedded) -> Iterator[bytes]:
    """A row of 32-bit floats for each input."""
    nbytes = 4 * reply.width
    return (reply.vectors[at : at + nbytes] for at in range(0, len(reply.vectors), nbytes or 1))


async def json_rows(reply: Embedded) -> list[msgspec.Raw]:
    rows = []
    for row in rows_of(reply):
        rows.append(msgspec.Raw(encode(struct.unpack(f"<{reply.width}f", row))))
        await asyncio.sleep(0)
    return rows
