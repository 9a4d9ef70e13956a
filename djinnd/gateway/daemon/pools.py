"""The gateway's connections to the daemon: a pool for each token.

A connection carries one request at a time. So a client that reads slowly keeps only its own connection full, and the
daemon holds only that run; and giving a request up is one message on its connection. Connections are kept for the next
request of the same token, which a new one costs a handshake.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from djinn_client.aio_steps import run
from djinn_client.connection import Connection, connect
from djinn_client.errors import ConnectionLost, NotAuthenticated
from djinnd.gateway.daemon.link import Link
from djinnd.gateway.http.errors import HttpError, unauthorised

IDLE_KEPT = 32  # connections of a pool
IDLE_POOLS = 256  # pools without a request; the longest unused one closes first
UNKNOWN_KEPT = 4096  # tokens that were refused
UNKNOWN_S = 2.0  # for which a refused token is not asked for again


class Pool:
    """The connections of one token; "" is the gateway's own Unix user. `requests`: that are being answered now."""

    def __init__(self, address: str, token: str) -> None:
        self.requests = 0
        self.name = ""  # of the principal, as the daemon says
        self.is_admin = False
        self._address = address
        self._token = token
        self._idle: list[Connection] = []

    async def prove(self) -> None:
        """Raises the daemon's error where it does not know the token, or cannot be reached. An open connection is the
        proof: the daemon closes those of a token that it revokes."""
        if not self._has_idle():
            self._idle.append(await self._connect())

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        connection = self._idle.pop() if self._has_idle() else await self._connect()
        try:
            yield Link(connection)
        finally:
            if connection.closed or len(self._idle) >= IDLE_KEPT:
                connection.close()
            else:
                self._idle.append(connection)

    @asynccontextmanager
    async def links(self, count: int) -> AsyncIterator[list[Link]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.link()) for _ in range(count)]

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _has_idle(self) -> bool:
        """Whether the last one is alive; those on which the daemon has hung up go."""
        while self._idle and self._idle[-1].is_hung_up():
            self._idle.pop().close()
        return bool(self._idle)

    async def _connect(self) -> Connection:
        connection = await run(connect(self._address, token=self._token))
        self.name = connection.welcome.name or str(connection.welcome.user)
        self.is_admin = connection.welcome.admin
        return connection


class Daemon:
    """All pools. `address`: of the daemon's socket."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pools: OrderedDict[str, Pool] = OrderedDict()  # the longest unused first
        self._unknown: OrderedDict[str, float] = OrderedDict()  # token → until when it is refused unasked

    async def pool(self, token: str) -> Pool:
        """Raises HttpError for a token that the daemon does not know, or where it cannot be reached."""
        if (until := self._unknown.get(token)) is not None and time.monotonic() < until:
            raise unauthorised("this token is not known, or holds no longer")
        pool = self._pools.get(token) or Pool(self._address, token)
        try:
            await pool.prove()
        except ConnectionLost as error:
            told = f"the daemon cannot be reached: {error.message}"
            raise HttpError(503, told, code="no_daemon", retry_s=1) from error
        except NotAuthenticated:
            self._refuse(token)
            raise
        self._pools[token] = pool
        self._pools.move_to_end(token)
        self._forget_unused()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _refuse(self, token: str) -> None:
        self._unknown[token] = time.monotonic() + UNKNOWN_S
        self._unknown.move_to_end(token)
        if len(self._unknown) > UNKNOWN_KEPT:
            self._unknown.popitem(last=False)

    def _forget_unused(self) -> None:
        if len(self._pools) <= IDLE_POOLS:
            return
        unused = next((token for token, pool in self._pools.items() if not pool.requests), None)
        if unused is not None:
            self._pools.pop(unused).close()
