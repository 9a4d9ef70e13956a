"""A process that keeps pages in a page file until it is killed: `python -m tests.support.kept_pages FOLDER SEED`.

It prints a line when the first page is complete.
"""

from __future__ import annotations

import mmap
import random
import sys
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from djinnd.kvcache.page_file import Bytes, PageFile
from djinnd.kvcache.tier import Tier

PAGE_BYTES, SLOTS, PAGES, IN_FLIGHT = 1 << 20, 12, 40, 4


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def aligned() -> Bytes:
    return np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)


def page(number: int) -> Bytes:
    """The contents of a page follow from its key."""
    buffer = aligned()
    buffer.view(np.uint64)[:] = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(number + 1)
    return buffer


def keep(folder: str, seed: int) -> None:
    choice = random.Random(seed)
    pages = [page(number) for number in range(PAGES)]
    file = PageFile(folder, "model", PAGE_BYTES, SLOTS, "")
    tier = Tier(file.table, SLOTS)
    writes: dict[Future[int], int] = {}
    is_keeping = False
    while True:
        wanted = key(number := choice.randrange(PAGES))
        if tier.find(wanted) is None and wanted not in tier and (slot := tier.prepare(wanted)) is not None:
            writes[file.write(slot, pages[number])] = slot
        if len(writes) == IN_FLIGHT:
            for done in wait(writes, return_when=FIRST_COMPLETED).done:
                tier.complete(writes.pop(done), done.result())
            if not is_keeping:
                is_keeping = True
                print("keeping", flush=True)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]))
