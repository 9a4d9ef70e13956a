from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from djinnd.engine.paging import checksums
from djinnd.engine.paging.checksums import THREADS, Checksums
from djinnd.kvcache.checksum import checksum
from djinnd.kvcache.moves import Direction, Move

PATIENCE_S = 10.0


def move(number: int) -> Move:
    return Move(Direction.DEMOTE, bytes(16), number, number)


def taken(sums: Checksums, count: int) -> dict[int, int]:
    """Checksums by the source of their moves."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found |= {move.source: summed for move, summed in sums.take()}
    return found


def test_each_page_gets_its_own_checksum() -> None:
    sums = Checksums()
    pages = [np.full(1 << 16, number, np.uint8) for number in range(50)]
    for number, page in enumerate(pages):
        sums.ask(page, move(number))
    assert taken(sums, 50) == {number: checksum(page) for number, page in enumerate(pages)}
    assert sums.take() == []
    sums.close()


def test_an_error_on_the_thread_is_raised_by_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(page: object) -> int:
        raise ValueError("the page is gone")

    sums = Checksums()
    monkeypatch.setattr(checksums, "checksum", fail)
    sums.ask(np.zeros(8, np.uint8), move(1))
    with pytest.raises(ValueError, match="the page is gone"):
        taken(sums, 1)
    monkeypatch.undo()
    sums.ask(np.zeros(8, np.uint8), move(2))
    assert taken(sums, 1).keys() == {2}, "the threads go on"
    sums.close()


def test_close_ends_the_threads_and_an_idle_thread_holds_no_page() -> None:
    before = threading.active_count()
    sums = Checksums()
    assert threading.active_count() == before + THREADS
    page = np.zeros(1 << 12, np.uint8)
    gone = weakref.ref(page)
    sums.ask(page, move(0))
    del page
    taken(sums, 1)
    deadline = time.monotonic() + PATIENCE_S
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None
    sums.close()
    assert threading.active_count() == before
