"""A connection to the daemon, leased for one HTTP request or a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from djinn_client import protocol
from djinn_client.errors import DjinnError
from djinn_client.protocol import Generate, Generated, Piece
from djinn_client.transport.aio_steps import run
from djinn_client.transport.connection import Connection
from djinn_client.transport.exchange import close_all

R = TypeVar("R", bound=protocol.Reply)

CLOSING_S = 10.0  # in which the daemon has to end a run and close its session


class Link:
    """A connection to the daemon, leased for one HTTP request or a part of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, request: protocol.Request, expected: type[R]) -> R:
        """The final reply. Raises the daemon's error. Cancelling the task ends the work in the daemon."""
        message, fds = await run(self.connection.call(request, expected))
        close_all(fds)
        return message

    async def stream(self, request: Generate) -> AsyncGenerator[Piece | Generated]:
        """Yields each Piece, and last the Generated. Closing the generator ends the work in the daemon."""
        try:
            await run(self.connection.start(request))
            while True:
                message, fds = await run(self.connection.receive())
                close_all(fds)
                if isinstance(message, Piece | Generated):
                    yield message
                if not isinstance(message, Piece | protocol.Progress):
                    return
        finally:
            self.connection.give_up()

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[str]:
        """Yields the id of a session that lasts as long as the context, also when the task is cancelled."""
        session = await self._open(model)
        try:
            yield session
        finally:
            closing = asyncio.ensure_future(self._close(session))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing
                raise

    async def _open(self, model: str) -> str:
        """A task that is cancelled here does not learn the id of a session that the daemon has opened meanwhile.
        Without its connection the daemon closes that session."""
        try:
            return (await self.call(protocol.OpenSession(id=0, model=model), protocol.SessionOpened)).session.id
        except asyncio.CancelledError:
            self.connection.close()
            raise

    async def _close(self, session: str) -> None:
        """A session that cannot be closed loses its connection, and the daemon closes it later."""
        try:
            async with asyncio.timeout(CLOSING_S):
                await self.call(protocol.CloseSession(id=0, session=session), protocol.Done)
        except (DjinnError, TimeoutError):
            self.connection.close()
