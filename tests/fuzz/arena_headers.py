"""Headers of shared-memory objects, which any user of the machine can make: a header or a ValueError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from djinnd.server.arenas.header import HEADER_BYTES, FillState, Header
from tests.fuzz.target import Target


def seeds() -> Iterator[bytes]:
    for holds in ("weights", "pages"):
        yield Header(1, 2, 3, FillState.COMPLETE, 4, 5, "f", holds, "m", "/s").pack()  # type: ignore[arg-type]


def check(data: bytes) -> None:
    whole = seeds_first[: HEADER_BYTES - len(data)] + data if len(data) < HEADER_BYTES else data
    changed = bytearray(seeds_first)
    for place in range(0, len(data) - 1, 2):
        changed[data[place] * 16 % HEADER_BYTES] = data[place + 1]
    for content in (data, whole, bytes(changed)):
        with suppress(ValueError):
            header = Header.unpack(content)
            Header.unpack(header.pack())


seeds_first = next(seeds())

TARGET = Target(("djinnd.server.arenas.header",), seeds, check)
