"""Threads for work on files that may never answer.

A file on a network or on a user's own file system answers when its server likes. Such work runs in a thread of its own,
at most PLACES for one user, so that it delays no other user. A thread cannot be killed. When its time is over, its
caller gets an error, and the thread keeps its user's place until it ends. Such threads do not delay the daemon's end.
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

PLACES = 4  # threads of one user


class SlowFiles:
    """Runs work in threads. `seconds`, which may be replaced, is the time that it may take, and again that it may wait
    for a place."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._places: dict[int, asyncio.Semaphore] = {}
        self._pieces: dict[int, int] = {}  # by user: calls that run or wait for a place
        self._let_go: set[asyncio.Task[None]] = set()

    async def run(self, user: int, work: Callable[[], T], discard: Callable[[T], None] = lambda _: None) -> T:
        """Runs `work` in a thread and returns its result. Raises its error, and Retry when the time is over. `discard`
        receives, in a thread, a result that comes after the caller has given up."""
        result = await self._start(user, self.seconds, work, discard)
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.wrap_future(result)
        except BaseException as error:
            if not result.cancel() and result.exception() is None:  # it has come just now
                self.let_go(user, partial(discard, result.result()))
            if isinstance(error, TimeoutError):
                raise self._too_slow() from error
            raise

    def let_go(self, user: int, work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
        """Runs `work`, such as closing files, when the user has a place, without a caller that waits. Then calls `then`
        on the loop."""
        task = asyncio.create_task(self._do(user, work, then))
        self._let_go.add(task)
        task.add_done_callback(self._let_go.discard)

    async def _do(self, user: int, work: Callable[[], Any], then: Callable[[], None]) -> None:
        await asyncio.wrap_future(await self._start(user, None, work, lambda _: None))
        then()

    async def _start(
        self, user: int, seconds: float | None, work: Callable[[], T], discard: Callable[[T], None]
    ) -> Future[T]:
        """Starts a thread for the work when the user has a place. Raises Retry after this many seconds without one."""
        places = self._places.setdefault(user, asyncio.Semaphore(PLACES))
        self._pieces[user] = self._pieces.get(user, 0) + 1
        try:
            async with asyncio.timeout(seconds):
                await places.acquire()
        except BaseException as error:
            self._leave(user)
            if isinstance(error, TimeoutError):
                raise self._too_slow() from error
            raise
        result: Future[T] = Future()
        work_of_thread = (user, work, discard, result, asyncio.get_running_loop())
        threading.Thread(target=self._work, args=work_of_thread, name="djinn-files", daemon=True).start()
        return result

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
        """Runs in the thread."""
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
