"""Knows the responses in progress, so that another request of the same principal can cancel one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from djinnd.gateway.responses.reply import Answer

T = TypeVar("T")


class Entry:
    """A response that one task works on."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.over = asyncio.Event()
        self.is_cancelled = False
        self._task = asyncio.current_task()
        self._waits = False  # the task waits for the daemon, and not for its client to read

    def cancel(self) -> None:
        assert self._task is not None
        if self._waits and not self.is_cancelled:
            self._task.cancel()
        self.is_cancelled = True

    async def until_cancelled(self, replies: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yields the replies. Ends early once the response is cancelled: at once where the task waits for a reply, else
        when its client has taken the last one."""
        while not self.is_cancelled:
            try:
                self._waits = True
                reply = await anext(replies, None)
            except asyncio.CancelledError:
                self._expect_cancelled_here()
                return
            finally:
                self._waits = False
            if reply is None:
                return
            yield reply

    def _expect_cancelled_here(self) -> None:
        """Lets a task that `cancel` has cancelled go on. Raises CancelledError for every other cancellation."""
        assert self._task is not None
        if not self.is_cancelled:
            raise asyncio.CancelledError
        self._task.uncancel()


class Running:
    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}  # by principal and response

    @contextmanager
    def entered(self, principal: str, name: str, answer: Answer) -> Iterator[Entry]:
        entry = self._entries[principal, name] = Entry(answer)
        try:
            yield entry
        finally:
            del self._entries[principal, name]
            entry.over.set()

    async def cancel(self, principal: str, name: str) -> Answer | None:
        """Returns when it has ended; None: there is no such response in progress."""
        entry = self._entries.get((principal, name))
        if entry is None:
            return None
        entry.cancel()
        await entry.over.wait()
        return entry.answer
