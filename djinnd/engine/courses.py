"""What takes longer than a step may wait, done beside the steps: a little in each turn of the engine's loop, or in a
thread.

A course is a generator. It yields what it waits for, such as a future, or None, to go on in the next turn; it ends by
itself, or with a DjinnError that its request is then told. Whoever closes it has it clean up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from djinn_client.errors import DjinnError
from djinnd.engine.channel import Channel

log = logging.getLogger("djinnd.engine")

T = TypeVar("T")


class Awaited(Protocol):
    """A future, or whatever else can say that."""

    def done(self) -> bool: ...


Wait = Awaited | None
Course = Generator[Wait, None, None]


@dataclass(slots=True, eq=False)
class _UnderWay:
    course: Course
    waits: Wait = None


class Courses:
    """Belongs to the engine's thread. One request has one course at a time. The thread for what blocks is one, so that
    what is given to it later happens later."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._under_way: dict[int, _UnderWay] = {}  # by request
        self._aside = ThreadPoolExecutor(1, "djinn-windows")

    def start(self, request: int, course: Course) -> None:
        """It begins in the next turn."""
        assert request not in self._under_way
        self._under_way[request] = _UnderWay(course)

    def drop(self, request: int) -> None:
        """Whoever waits for it is told by somebody else. Not from within the course."""
        self._under_way.pop(request).course.close()

    def turn(self) -> bool:
        """Once in each turn of the engine's loop. → whether something goes on in the next one at once."""
        busy = False
        for request, one in list(self._under_way.items()):
            if self._under_way.get(request) is not one or (one.waits is not None and not one.waits.done()):
                continue
            try:
                one.waits = next(one.course)
                while one.waits is not None and one.waits.done():
                    one.waits = next(one.course)
            except StopIteration:
                del self._under_way[request]
            except DjinnError as error:
                del self._under_way[request]
                self._channel.refuse(request, error)
            else:
                busy |= one.waits is None or one.waits.done()  # nobody wakes the loop for what is done already
        return busy

    def later(self, act: Callable[[], None]) -> None:
        """In the thread, and nobody waits for it."""
        self._aside.submit(act).add_done_callback(_note)

    def begin(self, act: Callable[[], T]) -> Future[T]:
        """In the thread; a course that waits for it goes on when it is done."""
        future: Future[T] = self._aside.submit(act)
        future.add_done_callback(lambda _: self._channel.wake())
        return future

    def elsewhere(self, act: Callable[[], T]) -> Generator[Wait, None, T]:
        """In the thread."""
        future = self.begin(act)
        yield future
        return future.result()

    def close(self) -> None:
        for one in self._under_way.values():
            one.course.close()
        self._aside.shutdown()


def _note(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.error("left_undone error=%r", error)
