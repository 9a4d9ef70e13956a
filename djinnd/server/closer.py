"""Closes descriptors that came from clients, in threads.

close(2) may take as long as a stranger likes: a socket lingers over data that nobody reads, the last descriptor of a
memfd frees gigabytes. So the event loop closes nothing but small memfds. Each user has a lane of its own with at most
EACH threads, so descriptors that linger delay only their sender's.
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
QUICK_BYTES = 4 << 20  # that a memfd may hold to be closed at once: freeing them takes about a millisecond


class Closer:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # for what follows, and for the lanes
        self._threads = 0
        self._waiting: deque[Lane] = deque()  # one entry for each thread that a lane wants and cannot have

    def lane(self) -> Lane:
        return Lane(self)

    def start(self, lane: Lane) -> None:
        """Has a thread work at the lane, now or when one has time."""
        with self._lock:
            if lane.threads >= EACH or not lane.fds:
                return
            lane.threads += 1
            if self._threads >= THREADS:
                self._waiting.append(lane)
                return
            self._threads += 1
        threading.Thread(target=self._work, args=(lane,), name="closer", daemon=True).start()

    def _work(self, lane: Lane) -> None:
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
            except RuntimeError:  # the loop is closed: the daemon ends
                return


class Lane:
    """One user's. `fds`: descriptors that no thread has taken yet, each with what is called in the loop when it is
    closed."""

    def __init__(self, closer: Closer) -> None:
        self.fds: deque[tuple[int, Callable[[], None]]] = deque()
        self.threads = 0
        self._closer = closer

    def close(self, fds: Iterable[int], closed: Callable[[], None] = lambda: None) -> None:
        """`closed` is called for each of them, at once for those that take no time."""
        for fd in fds:
            if _is_quick(fd):
                os.close(fd)
                closed()
            else:
                self.fds.append((fd, closed))
                self._closer.start(self)


def _is_quick(fd: int) -> bool:
    """Whether it is a small memfd. F_GET_SEALS does no I/O on any kind of file, and fstat does none on a memfd."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return os.fstat(fd).st_blocks * 512 <= QUICK_BYTES
    except OSError:
        return False


def close_quietly(fd: int) -> None:
    """Whatever close(2) says, the descriptor is gone afterwards."""
    with suppress(OSError):
        os.close(fd)


def close_fds(fds: Iterable[int]) -> None:
    """Of the daemon's own."""
    for fd in fds:
        os.close(fd)
