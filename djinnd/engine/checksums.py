"""Checksums of pages on the host, taken in threads of their own.

The engine's thread launches a step's kernels meanwhile, and lets go of the interpreter with each of them. Whatever a
thread does in Python just then, the step waits for. So between two pages a thread here does next to nothing: it has no
Future, and no lock but the queue's, which is C.
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

# One may keep up with a bus where a core reads 30 GB/s; where cores or memory are slower it takes several. More than
# four were felt by the steps (docs/log.md).
THREADS = max(2, min(4, (os.cpu_count() or 2) // 2))

Bytes = npt.NDArray[np.uint8]


class Checksums:
    """Used by one thread, which leaves a page alone until its checksum has been taken."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Bytes, Move] | None] = SimpleQueue()
        self._taken: deque[tuple[Move, int | BaseException]] = deque()
        self._threads = [threading.Thread(target=self._take, name="djinn-sums", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def ask(self, page: Bytes, move: Move) -> None:
        """`move`: what it is wanted for."""
        self._asked.put((page, move))

    def take(self) -> list[tuple[Move, int]]:
        """Those that are there now, in no order."""
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
            except BaseException as error:  # whoever asked is told
                self._taken.append((move, error))
            del asked, page, move  # not held while there is nothing to do: a model that is unloaded unmaps its pages
