"""Computes checksums of host pages on threads.

The engine's thread launches a step's kernels at the same time and releases the interpreter lock with each of them.
Any Python code that another thread runs then delays the step. So a thread here does almost nothing between two pages:
it has no Future, and no lock except the queue's, which is implemented in C.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.checksum import checksum
from djinnd.kvcache.moves import Move

# One thread can keep up with a bus if a core reads 30 GB/s; slower cores or memory need several. More than four slowed
# steps down (docs/log).
THREADS = max(2, min(4, (os.cpu_count() or 2) // 2))

Bytes = npt.NDArray[np.uint8]


class Checksums:
    """Used by one thread, which must not write a page between `ask` and its result in `take`."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Bytes, Move] | None] = SimpleQueue()
        self._taken: deque[tuple[Move, int | BaseException]] = deque()
        self._threads = [threading.Thread(target=self._take, name="djinn-sums", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def ask(self, page: Bytes, move: Move) -> None:
        """`move`: identifies the result in `take`."""
        self._asked.put((page, move))

    def take(self) -> list[tuple[Move, int]]:
        """The results that are there now, in no particular order."""
        taken = []
        while self._taken:
            move, outcome = self._taken.popleft()
            if isinstance(outcome, BaseException):
                raise outcome
            taken.append((move, outcome))
        return taken

    def close(self) -> None:
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def _take(self) -> None:
        while (asked := self._asked.get()) is not None:
            page, move = asked
            try:
                self._taken.append((move, checksum(page)))
            except BaseException as error:  # `take` raises it
                self._taken.append((move, error))
            del asked, page, move  # keep no page mapped while idle: the model may be unloaded
