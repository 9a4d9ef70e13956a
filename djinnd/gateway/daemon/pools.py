"""The gateway's connections to the daemon: a pool for each token.

A connection carries one request at a time. So a slow client fills only its own connection, the daemon holds back only
that client's run, and cancelling a request is one message on its connection. A connection is kept for the next request
of the same token: a new one costs a handshake.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from djinn_client.errors import NotAuthenticated
from djinn_client.transport.aio_steps import run
from djinn_client.transport.connection import Connection, connect
from djinnd.gateway.daemon.link import Link
from djinnd.gateway.daemon.refused_tokens import RefusedTokens

IDLE_KEPT = 32  # connections of a pool
IDLE_S = 60.0  # that a connection is kept unused
IDLE_POOLS = 256  # pools without a request; the longest unused one closes first


class Pool:
    """The connections of one token, or of the gateway's own Unix user, whose token is "".

    requests: how many are being answered. held: bytes of their bodies."""

    def __init__(self, address: str, token: str) -> None:
        self.requests = 0
        self.held = 0
        self.name = ""  # of the principal, as the daemon says
        self.is_admin = False
        self._address = address
        self._token = token
        self._idle: list[tuple[Connection, float]] = []  # and since when; the longest unused first
        self._sweep: asyncio.TimerHandle | None = None

    async def prove(self) -> None:
        """Raises the daemon's error if it does not know the token, or cannot be reached. An open connection is the
        proof: when a token is revoked, the daemon closes its connections."""
        if not self._has_idle():
            self._keep(await self._connect())

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """A connection to the daemon, for as long as the context lasts."""
        connection = self._idle.pop()[0] if self._has_idle() else await self._connect()
        try:
            yield Link(connection)
        finally:
            self._keep(connection)

    def close(self) -> None:
        self._close_until(time.monotonic())
        if self._sweep is not None:
            self._sweep.cancel()

    def _keep(self, connection: Connection) -> None:
        if connection.closed or len(self._idle) >= IDLE_KEPT:
            connection.close()
            return
        self._idle.append((connection, time.monotonic()))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_unused)

    def _close_unused(self) -> None:
        self._sweep = None
        self._close_until(time.monotonic() - IDLE_S)
        if self._idle:
            rest = self._idle[0][1] + IDLE_S - time.monotonic()
            self._sweep = asyncio.get_running_loop().call_later(rest, self._close_unused)

    def _close_until(self, since: float) -> None:
        while self._idle and self._idle[0][1] <= since:
            self._idle.pop(0)[0].close()

    def _has_idle(self) -> bool:
        """True if the last one is alive. Connections that the daemon has closed are dropped."""
        while self._idle and self._idle[-1][0].is_hung_up():
            self._idle.pop()[0].close()
        return bool(self._idle)

    async def _connect(self) -> Connection:
        connection = await run(connect(self._address, token=self._token))
        self.name = connection.welcome.name or str(connection.welcome.user)
        self.is_admin = connection.welcome.admin
        return connection


class Daemon:
    """All pools. `address`: of the daemon's socket. `own`: the pool of the gateway's own Unix user."""

    def __init__(self, address: str, refused: RefusedTokens) -> None:
        self.own = Pool(address, "")
        self._address = address
        self._pools: OrderedDict[str, Pool] = OrderedDict()  # by token, the longest unused first
        self._refused = refused

    async def pool(self, token: str) -> Pool:
        """Raises NotAuthenticated, ConnectionLost."""
        if not token:
            await self.own.prove()
            return self.own
        self._refused.check(token)
        pool = self._pools.get(token) or Pool(self._address, token)
        try:
            await pool.prove()
        except NotAuthenticated:
            self._refused.add(token)
            raise
        if (other := self._pools.setdefault(token, pool)) is not pool:  # another request was faster
            pool.close()
        self._pools.move_to_end(token)
        self._forget_unused()
        return other

    def close(self) -> None:
        for pool in (self.own, *self._pools.values()):
            pool.close()

    def _forget_unused(self) -> None:
        """The pool that was just asked for is the last one, and stays."""
        if len(self._pools) <= IDLE_POOLS:
            return
        unused = next((token for token, pool in self._pools.items() if not pool.requests), None)
        if unused is not None:
            self._pools.pop(unused).close()
