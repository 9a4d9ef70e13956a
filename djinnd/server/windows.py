"""The windows that a user's clients keep: memfds with activations, logits or KV, which count until they are gone.

A client keeps a window by a descriptor or a mapping, in whatever process. The kernel tells whether anybody does: it
grants a write lease on a file only if nobody else has the file open. So a client is given a file that was opened for
it, and the server keeps another one, for reading, to ask by. That one keeps the memory, too, and is closed as soon as
nobody else does.

    engine ── memfd ──► server ── opened anew, for writing ──► client
                          └────── opened anew, for reading: asked by, every PERIOD and before a new window
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence

from djinnd.server.closer import Lane
from djinnd.server.ledger import WINDOW_BYTES, Ledger

PERIOD = 0.25  # seconds


class Windows:
    """One user's."""

    def __init__(self, ledger: Ledger, lane: Lane) -> None:
        self._ledger = ledger
        self._lane = lane
        self._kept: dict[int, int] = {}  # descriptor that is asked by → bytes
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def reserve(self, nbytes: int) -> None:
        """For a window that a call is going to make; `release` follows. Raises QuotaExceeded."""
        self._sweep()
        self._ledger.charge(WINDOW_BYTES, nbytes)

    def release(self, nbytes: int) -> None:
        self._ledger.release(WINDOW_BYTES, nbytes)

    def hand_over(self, fds: Sequence[int]) -> list[int]:
        """Takes windows, and answers with the descriptors that a client is to be given of them."""
        given = []
        for fd in fds:
            given.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            kept = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._kept[kept] = os.fstat(fd).st_size
            self._ledger.add(WINDOW_BYTES, self._kept[kept])
            os.close(fd)
        if self._kept and self._next is None:
            self._next = asyncio.get_running_loop().call_later(PERIOD, self._look)
        return given

    def close(self) -> None:
        """The daemon ends."""
        if self._next is not None:
            self._next.cancel()
        self._lane.close(list(self._kept))
        self._kept.clear()

    def _look(self) -> None:
        self._sweep()
        self._next = asyncio.get_running_loop().call_later(PERIOD, self._look) if self._kept else None

    def _sweep(self) -> None:
        for fd in [fd for fd in self._kept if not _is_kept(fd)]:
            self._ledger.release(WINDOW_BYTES, self._kept.pop(fd))
            self._lane.close([fd])


def _is_kept(fd: int) -> bool:
    """Whether anybody else has the file open or mapped."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
