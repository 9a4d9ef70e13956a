"""The table and the pages of a disk tier, damaged in any way: they open, and a page is read as it was or not at all."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from djinnd.kvcache.page_file import BadPage, PageFile
from djinnd.kvcache.tier import Tier
from tests.fuzz.target import Target

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
SLOTS, PAGE_BYTES = 6, 5000
KEYS = [bytes([number]) * 16 for number in range(4)]
NAMES = ("m.table", "m.pages")


def page(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    memory = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    memory[:PAGE_BYTES] = np.arange(PAGE_BYTES) % (number + 100)
    return memory


def opened(folder: Path) -> PageFile:
    return PageFile(str(folder), "m", PAGE_BYTES, SLOTS, "f", any_size=True)


def whole() -> Path:
    folder = FOLDER / "whole"
    if not folder.exists():
        file = opened(folder)
        tier = Tier(file.table, file.slots, page_bytes=PAGE_BYTES)
        for number, key in enumerate(KEYS):
            slot = tier.prepare(key, tenant=number)
            assert slot is not None
            tier.complete(slot, file.write(slot, page(number)).result())
        file.close()
    return folder


def seeds() -> Iterator[bytes]:
    yield b"\0\0\1\2\3"
    yield bytes(range(40))


def check(data: bytes) -> None:
    folder = FOLDER / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole(), folder)
    for at in range(0, len(data) - 3, 4):
        path = folder / NAMES[data[at] % 2]
        content = bytearray(path.read_bytes())
        place = int.from_bytes(data[at + 1 : at + 3], "little")
        if data[at] > 250:
            path.write_bytes(content[:place])
        elif content:
            content[place % len(content)] ^= data[at + 3]
            path.write_bytes(content)
    file = opened(folder)
    try:
        tier = Tier(file.table, file.slots, page_bytes=PAGE_BYTES)
        tier.check_integrity()
        for number, key in enumerate(KEYS):
            if (slot := tier.peek(key)) is not None:
                _expect(file, tier, slot, number)
    finally:
        file.close()


def _expect(file: PageFile, tier: Tier, slot: int, number: int) -> None:
    into = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    try:
        file.read(slot, into, tier.checksum(slot)).result()
    except BadPage:
        return
    assert (into[:PAGE_BYTES] == page(number)[:PAGE_BYTES]).all(), number


TARGET = Target(("djinnd.kvcache.page_file", "djinnd.kvcache.tier"), seeds, check)
