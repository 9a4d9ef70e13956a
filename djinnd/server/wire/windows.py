"""The windows that a user's clients keep: memfds with activations, logits or KV, which count until they are freed.

A client keeps a window by a descriptor or a mapping, in any process. The kernel knows if there is one: it grants a
write lease on a file only if no other open file refers to it. So the client gets a descriptor that was opened for it,
and the server keeps one for reading, on which it requests a lease. The server's descriptor keeps the memory alive too,
and is closed as soon as the lease is granted.

    engine ── memfd ──► server ── opened again, for writing ──► client
                          └────── opened again, for reading: tested every PERIOD and before a new window
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence

from djinnd.server.quotas.ledger import WINDOW_BYTES, Ledger
from djinnd.server.system.closer import CloseLane

PERIOD = 0.25  # seconds


class Windows:
    """The windows of one user."""

    def __init__(self, ledger: Ledger, lane: CloseLane) -> None:
        self._ledger = ledger
        self._lane = lane
        self._kept: dict[int, int] = {}  # bytes, by the descriptor that is kept for the test
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def reserve(self, nbytes: int) -> None:
        """Charges a window that a call is about to create; `release` follows. Raises QuotaExceeded."""
        self._sweep()
        self._ledger.charge(WINDOW_BYTES, nbytes)

    def release(self, nbytes: int) -> None:
        self._ledger.release(WINDOW_BYTES, nbytes)

    def hand_over(self, fds: Sequence[int]) -> list[int]:
        """Takes the descriptors of windows, and returns those for the client."""
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
        """Closes all descriptors, when the daemon ends."""
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
    """True if another open file or mapping of the window exists."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
