"""A connection to the daemon, leased for one HTTP request or a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from djinn_client.aio_steps import run
from djinn_client.connection import Connection
from djinn_client.errors import DjinnError
from djinn_client.exchange import close_all
from djinn_client.protocol import (
    CloseSession,
    Done,
    ForkSession,
    Generate,
    Generated,
    OpenSession,
    Piece,
    Progress,
    Reply,
    Request,
    SessionOpened,
)

R = TypeVar("R", bound=Reply)

CLOSING_S = 10.0  # that the daemon has to end a run and close its session


class Link:
    """A connection to the daemon, leased for one HTTP request or a part of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, request: Request, expected: type[R]) -> R:
        """The final reply. Raises the daemon's error. Cancelling the task ends the work in the daemon."""
        message, fds = await run(self.connection.call(request, expected))
        close_all(fds)
        return message

    async def stream(self, request: Generate) -> AsyncGenerator[Piece | Generated]:
        """Each Piece, and last the Generated. Closing the generator ends the work in the daemon."""
        try:
            await run(self.connection.start(request))
            while True:
                message, fds = await run(self.connection.receive())
                close_all(fds)
                if isinstance(message, Piece | Generated):
                    yield message
                if not isinstance(message, Piece | Progress):
                    return
        finally:
            self.connection.give_up()

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[str]:
        """A session for as long as the context lasts: its id."""
        session = (await self.call(OpenSession(id=0, model=model), SessionOpened)).session.id
        async with self._closed_after(session):
            yield session

    @asynccontextmanager
    async def fork(self, session: str) -> AsyncIterator[str]:
        forked = (await self.call(ForkSession(id=0, session=session), SessionOpened)).session.id
        async with self._closed_after(forked):
            yield forked

    @asynccontextmanager
    async def _closed_after(self, session: str) -> AsyncIterator[None]:
        """Also when the task is cancelled, be it while the session is being closed."""
        try:
            yield
        finally:
            closing = asyncio.ensure_future(self._close(session))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing
                raise

    async def _close(self, session: str) -> None:
        with suppress(DjinnError, TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self.call(CloseSession(id=0, session=session), Done)
