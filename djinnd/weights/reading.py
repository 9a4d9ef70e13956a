"""Threads that read files, and that nobody has to wait for.

A read may never return: a network share hangs, the owner of a FUSE file system does not answer. Nothing interrupts a
thread in it. So files are read in threads that can be left behind, and who waits for them does so for as long as bytes
come:

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

SECONDS = 30.0  # in which at least LEAST bytes come, or the load has failed
LEAST = 16 << 20
SLOW = 32 << 20  # bytes a second; whose files come more slowly lets others go first
TICK = 1.0  # seconds between two looks at what has come
_LET_END = 5.0  # seconds that threads are given to end what they are reading


class Readers:
    """A pool of threads that take jobs until `close`, which leaves those behind that do not come back."""

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
        """Jobs that nobody has begun are cancelled."""
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
                except BaseException as error:  # whoever waits is told
                    future.set_exception(error)
            del job, future, act  # they hold memory and files


class Patience:
    """Of one load, in one thread. `count` says how many bytes have come; `look` is called now and then while somebody
    waits, and may raise; `slow` is called where the bytes come slowly."""

    def __init__(
        self,
        count: Callable[[], int] = lambda: 0,
        look: Callable[[], None] = lambda: None,
        slow: Callable[[], None] = lambda: None,
    ) -> None:
        self._count = count
        self._look = look
        self._slow = slow
        self._seen = self._enough = 0  # bytes, at the last look, and when there last were LEAST
        self._waited = 0.0  # seconds since then

    def result(self, future: Future[T]) -> T:
        """Raises what the job has raised; ModelRejected where too little comes; and what `look` raises."""
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
                f"the checkpoint's files gave {came:,} bytes in {self._waited:.0f} s, and the load is given up: is the "
                "disk or the network that they are on in order?",
                bytes=came,
                seconds=SECONDS,
            )
