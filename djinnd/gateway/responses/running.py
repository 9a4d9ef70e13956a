"""Responses in progress, so that another request of the same principal can cancel one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from djinnd.gateway.responses.reply import Answer


class Entry:
    """A response that a task works on."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.over = asyncio.Event()
        self._task = asyncio.current_task()
        self._is_cancelled = False

    def cancel(self) -> None:
        assert self._task is not None
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def expect_cancelled(self) -> None:
        """The task was cancelled. Raises CancelledError unless that was here, and lets the task go on then."""
        assert self._task is not None
        if not self._is_cancelled:
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
