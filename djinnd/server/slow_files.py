"""Threads for work on files that may never answer.

A file on a network or a user's own file system answers when its server likes. Such work runs in a thread of its own, a
few of one user at a time, so that nobody but that user waits behind it. A thread cannot be killed: where the time is
over its caller is told, and the thread keeps its user's place until it ends. It never delays the daemon's end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from djinn_client.errors import Retry

T = TypeVar("T")

PLACES = 4  # of one user


class SlowFiles:
    """`seconds`: that a piece of work may take, and wait for its place; may be replaced."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._places: dict[int, asyncio.Semaphore] = {}
        self._pieces: dict[int, int] = {}  # by user: pieces of work that run or wait for a place
        self._let_go: set[asyncio.Task[None]] = set()

    async def run(self, user: int, work: Callable[[], T], discard: Callable[[T], None] = lambda _: None) -> T:
        """What `work` returns. Raises what it raises, and Retry when the time is over. `discard` gets a result for
        which nobody waits any more, in a thread too."""
        await self._take_place(user, self.seconds)
        result: Future[T] = Future()
        _start(self._work, user, work, discard, result, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.wrap_future(result)
        except BaseException as error:
            if not result.cancel() and result.exception() is None:  # it has just come
                self.let_go(user, partial(discard, result.result()))
            if isinstance(error, TimeoutError):
                raise self._too_slow() from error
            raise

    def let_go(self, user: int, work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
        """Does what nobody waits for, such as closing files, when the user has a place; and `then`, in the loop."""
        task = asyncio.create_task(self._do(user, work, then))
        self._let_go.add(task)
        task.add_done_callback(self._let_go.discard)

    async def _do(self, user: int, work: Callable[[], Any], then: Callable[[], None]) -> None:
        await self._take_place(user, None)
        result: Future[Any] = Future()
        _start(self._work, user, work, lambda _: None, result, asyncio.get_running_loop())
        await asyncio.wrap_future(result)
        then()

    async def _take_place(self, user: int, seconds: float | None) -> None:
        places = self._places.setdefault(user, asyncio.Semaphore(PLACES))
        self._pieces[user] = self._pieces.get(user, 0) + 1
        try:
            async with asyncio.timeout(seconds):
                await places.acquire()
        except TimeoutError as error:
            self._leave(user)
            raise self._too_slow() from error
        except BaseException:
            self._leave(user)
            raise

    def _too_slow(self) -> Retry:
        return Retry(f"the files did not answer within {self.seconds:g} s: try again when they do", limit=self.seconds)

    def _work(
        self,
        user: int,
        work: Callable[[], T],
        discard: Callable[[T], None],
        result: Future[T],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """In the thread."""
        try:
            found = work()
        except BaseException as error:
            with suppress(InvalidStateError):
                result.set_exception(error)
        else:
            try:
                result.set_result(found)
            except InvalidStateError:
                discard(found)
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(self._ended, user)

    def _ended(self, user: int) -> None:
        self._places[user].release()
        self._leave(user)

    def _leave(self, user: int) -> None:
        self._pieces[user] -= 1
        if not self._pieces[user]:
            del self._pieces[user], self._places[user]


def _start(work: Callable[..., Any], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="djinn-files", daemon=True).start()
