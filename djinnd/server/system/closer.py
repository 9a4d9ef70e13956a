"""Closes descriptors that came from clients, in threads.

A client can make close(2) take long: a socket may linger over unread data, and the last descriptor of a memfd frees
gigabytes. So the event loop closes only small memfds. Each user has a lane with at most EACH threads: descriptors that
linger delay only other descriptors of their sender.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

THREADS = 32
EACH = 2  # threads of one lane
QUICK_BYTES = 4 << 20  # a memfd up to this size is closed on the event loop: freeing it takes about a millisecond


class Closer:
    """The threads that close descriptors. Lanes share them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the members below, and the lanes
        self._threads = 0
        self._waiting: deque[CloseLane] = deque()  # an entry for each thread that a lane could not get

    def lane(self) -> CloseLane:
        return CloseLane(self)

    def start(self, lane: CloseLane) -> None:
        """Lets a thread work on the lane, at once or when one is free."""
        with self._lock:
            if lane.threads >= EACH or not lane.fds:
                return
            lane.threads += 1
            if self._threads >= THREADS:
                self._waiting.append(lane)
                return
            self._threads += 1
        threading.Thread(target=self._work, args=(lane,), name="closer", daemon=True).start()

    def _work(self, lane: CloseLane) -> None:
        while True:
            with self._lock:
                if not lane.fds:
                    lane.threads -= 1
                    if not self._waiting:
                        self._threads -= 1
                        return
                    lane = self._waiting.popleft()
                    continue
                fd, closed = lane.fds.popleft()
            close_quietly(fd)
            try:
                self._loop.call_soon_threadsafe(closed)
            except RuntimeError:  # the loop is closed: the daemon is ending
                return


class CloseLane:
    """The descriptors of one user. `fds`: descriptors that no thread has taken yet, each with the callback that the
    event loop runs after it was closed."""

    def __init__(self, closer: Closer) -> None:
        self.fds: deque[tuple[int, Callable[[], None]]] = deque()
        self.threads = 0
        self._closer = closer

    def close(self, fds: Iterable[int], closed: Callable[[], None] = lambda: None) -> None:
        """Closes descriptors. `closed` is called for each of them: at once if it was closed here, else after a thread
        has."""
        for fd in fds:
            if _is_quick(fd):
                os.close(fd)
                closed()
            else:
                self.fds.append((fd, closed))
                self._closer.start(self)


def _is_quick(fd: int) -> bool:
    """True if it is a small memfd. F_GET_SEALS does no I/O on any kind of file, and fstat does none on a memfd."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return os.fstat(fd).st_blocks * 512 <= QUICK_BYTES
    except OSError:
        return False


def close_quietly(fd: int) -> None:
    """Closes a descriptor. It is gone afterwards, also if close(2) returns an error."""
    with suppress(OSError):
        os.close(fd)


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors of the daemon itself."""
    for fd in fds:
        os.close(fd)
