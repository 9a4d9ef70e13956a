"""Runs work that must not hold up a step: a part in each turn of the engine's loop, or on a thread.

A task is a generator. It yields an object to wait for, such as a future, or None to continue in the next turn. It
ends by returning, or with a DjinnError, which is then sent to its request. Closing the generator makes it clean up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from djinn_client.errors import DjinnError
from djinnd.engine.io.channel import ServerChannel

log = logging.getLogger("djinnd.engine")

T = TypeVar("T")


class Awaited(Protocol):
    """A future, or another object with `done`."""

    def done(self) -> bool: ...


Wait = Awaited | None
BackgroundTask = Generator[Wait, None, None]


@dataclass(slots=True, eq=False)
class _UnderWay:
    task: BackgroundTask
    waits: Wait = None


class BackgroundWork:
    """Used by the engine's thread. A request has at most one task at a time. There is one thread for blocking work,
    so work runs in the order in which it is submitted."""

    def __init__(self, channel: ServerChannel) -> None:
        self._channel = channel
        self._under_way: dict[int, _UnderWay] = {}  # by request
        self._aside = ThreadPoolExecutor(1, "djinn-windows")

    def start(self, request: int, task: BackgroundTask) -> None:
        """The task begins in the next turn."""
        assert request not in self._under_way
        self._under_way[request] = _UnderWay(task)

    def drop(self, request: int) -> None:
        """Closes the request's task without a reply; the caller sends one. Must not be called by the task
        itself."""
        self._under_way.pop(request).task.close()

    def turn(self) -> bool:
        """Called in each turn of the engine's loop. → True if a task continues at once."""
        busy = False
        for request, one in list(self._under_way.items()):
            if self._under_way.get(request) is not one or (one.waits is not None and not one.waits.done()):
                continue
            try:
                one.waits = next(one.task)
                while one.waits is not None and one.waits.done():
                    one.waits = next(one.task)
            except StopIteration:
                del self._under_way[request]
            except DjinnError as error:
                del self._under_way[request]
                self._channel.refuse(request, error)
            else:
                # the loop is not woken for something that is done already
                busy |= one.waits is None or one.waits.done()
        return busy

    def later(self, act: Callable[[], None]) -> None:
        """Runs `act` on the thread. Its result is dropped, and an error is only logged."""
        self._aside.submit(act).add_done_callback(_note)

    def begin(self, act: Callable[[], T]) -> Future[T]:
        """Runs `act` on the thread. The loop wakes when it is done."""
        future: Future[T] = self._aside.submit(act)
        future.add_done_callback(lambda _: self._channel.wake())
        return future

    def on_thread(self, act: Callable[[], T]) -> Generator[Wait, None, T]:
        """Runs `act` on the thread and waits for its result. For use inside a task."""
        future = self.begin(act)
        yield future
        return future.result()

    def close(self) -> None:
        for one in self._under_way.values():
            one.task.close()
        self._aside.shutdown()


def _note(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.error("background_work_failed error=%r", error)
