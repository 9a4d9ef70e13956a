"""Reads files in threads that can be abandoned.

A read may never return, for example from a network share that hangs or a FUSE file system that does not answer, and
nothing can interrupt a thread in it. So files are read in threads of their own, and the loader waits only as long as
bytes arrive:

    loader thread ──submit──► Readers ──► threads ──preadv──► memory
          └───────────────── Patience: Future ◄──┘            too few bytes for too long: ModelRejected
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from djinn_client.errors import ModelRejected

T = TypeVar("T")
Wait = Callable[[Future[Any]], Any]  # → the future's result

SECONDS = 30.0  # a load fails if fewer than LEAST bytes arrive in this time
LEAST = 16 << 20  # bytes
SLOW = 32 << 20  # bytes a second; a load with slower files lets other loads go first
TICK = 1.0  # seconds between two checks of the bytes that have arrived
_LET_END = 5.0  # seconds that `close` waits for threads to finish their reads


class Readers:
    """A pool of threads that take jobs until `close`. A thread that hangs in a read is abandoned."""

    def __init__(self, count: int, name: str = "djinn-read") -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, act))
        return future

    def close(self) -> None:
        """Cancels jobs that have not begun, and waits a few seconds for the others."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + _LET_END
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, act = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:  # the future passes it to the waiting thread
                    future.set_exception(error)
            del job, future, act  # drop references to memory and files before waiting for the next job


def alone(act: Callable[[], T], name: str) -> Future[T]:
    """Runs `act` on a daemon thread of its own. A thread that hangs in a read is abandoned."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # the future passes it to the waiting thread
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


class Patience:
    """Waits for the reads of one load, in one thread, and gives up if too few bytes arrive.

    count: returns the bytes that have arrived so far.
    look: called about once a TICK while waiting; may raise.
    slow: called at each check that finds a rate below SLOW.
    """

    def __init__(
        self,
        count: Callable[[], int] = lambda: 0,
        look: Callable[[], None] = lambda: None,
        slow: Callable[[], None] = lambda: None,
    ) -> None:
        self._count = count
        self._look = look
        self._slow = slow
        self._seen = self._enough = 0  # bytes at the last check, and at the last time that LEAST bytes had arrived
        self._waited = 0.0  # seconds of waiting since that time

    def result(self, future: Future[T]) -> T:
        """The job's result. Raises the job's exception, ModelRejected if too few bytes arrive, and exceptions of
        `look`."""
        while True:
            began = time.monotonic()
            try:
                return future.result(TICK)
            except TimeoutError:
                if future.done():
                    raise
            finally:
                self._waited += time.monotonic() - began
            self._look()
            self._judge(self._count())

    def _judge(self, count: int) -> None:
        if count - self._seen < SLOW * TICK:
            self._slow()
        self._seen = count
        if count - self._enough >= LEAST:
            self._enough, self._waited = count, 0.0
        elif self._waited >= SECONDS:
            came = count - self._enough
            raise ModelRejected(
                f"the checkpoint's files gave {came:,} bytes in {self._waited:.0f} s, so the load was given up: check "
                "the disk or the network that they are on",
                bytes=came,
                seconds=SECONDS,
            )
