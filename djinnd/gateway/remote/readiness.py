"""The descriptors for which a relay waits in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Act = Callable[[], None]


class Readiness:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reads: set[int] = set()
        self._writes: set[int] = set()

    def reading(self, fd: int, act: Act, wanted: bool) -> None:
        """From now on `act` is called while the descriptor can be read, or no more."""
        if wanted and fd not in self._reads:
            self._loop.add_reader(fd, act)
            self._reads.add(fd)
        elif fd in self._reads and not wanted:
            self._loop.remove_reader(fd)
            self._reads.discard(fd)

    def writing(self, fd: int, act: Act, wanted: bool) -> None:
        """From now on `act` is called while the descriptor can be written, or no more."""
        if wanted and fd not in self._writes:
            self._loop.add_writer(fd, act)
            self._writes.add(fd)
        elif fd in self._writes and not wanted:
            self._loop.remove_writer(fd)
            self._writes.discard(fd)

    def forget(self, fd: int) -> None:
        """Call it before the descriptor is closed."""
        if fd in self._reads:
            self._loop.remove_reader(fd)
        if fd in self._writes:
            self._loop.remove_writer(fd)
        self._reads.discard(fd)
        self._writes.discard(fd)
