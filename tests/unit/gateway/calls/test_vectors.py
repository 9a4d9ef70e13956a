from __future__ import annotations

import asyncio
import json
import struct

from djinn_client.protocol import Embedded
from djinnd.gateway.calls.vectors import json_rows, rows_of


def embedded(*rows: tuple[float, ...]) -> Embedded:
    vectors = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    return Embedded(id=1, vectors=vectors, width=len(rows[0]) if rows else 0, tokens=[1] * len(rows), pooling="mean")


def test_rows_as_bytes_and_as_json():
    reply = embedded((0.5, -1.0, 0.25), (1.0, 0.0, 2.0))
    assert list(rows_of(reply)) == [reply.vectors[:12], reply.vectors[12:]]
    assert [json.loads(bytes(row)) for row in asyncio.run(json_rows(reply))] == [[0.5, -1.0, 0.25], [1.0, 0.0, 2.0]]
    assert asyncio.run(json_rows(embedded())) == []


def test_other_tasks_have_their_turn_between_rows():
    async def main() -> None:
        task = asyncio.create_task(json_rows(embedded((1.0,), (2.0,), (3.0,))))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 3

    asyncio.run(main())
