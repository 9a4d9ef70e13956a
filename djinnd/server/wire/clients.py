"""All connected clients, and their shared state."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from djinn_client.errors import NotPermitted, QuotaExceeded
from djinn_client.protocol import Failure, Request, Signal, encode
from djinnd.config import Limits
from djinnd.server.principals.tokens import Bearer, Tokens
from djinnd.server.quotas.quotas import Tenant
from djinnd.server.system.closer import Closer
from djinnd.server.system.peers import UNKNOWN, Peer, unmapped_uid
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.traffic import Traffic
from djinnd.server.wire.windows import Windows

log = logging.getLogger("djinnd.server")

Handle = Callable[[ClientCall, Request], Coroutine[Any, Any, FinalReply]]


class Accounts(NamedTuple):
    """The accounts of one user's connections."""

    tenant: Tenant
    traffic: Traffic
    windows: Windows


@dataclass(eq=False)
class ClientTable:
    """The table of connected clients, with the accounts of their users. `limits` may be replaced. `after`: see
    Journal."""

    limits: Limits
    admins: InitVar[Collection[int]]
    handle: Handle
    signal: Callable[[ConnectedClient, Signal], None]
    _on_gone: Callable[[ConnectedClient], None]
    after: Callable[..., None]
    _tenant_of: Callable[[int], Tenant]
    _tokens: Tokens
    unfinished: int = field(init=False, default=0)
    idle: asyncio.Event = field(init=False, default_factory=asyncio.Event)  # set while no request is unfinished
    # By user; never removed, as messages may outlive the connections.
    _accounts: dict[int, Accounts] = field(init=False, default_factory=dict)
    _clients: set[ConnectedClient] = field(init=False, default_factory=set)
    _connections: Counter[int] = field(init=False, default_factory=Counter)  # by user
    _fewer: asyncio.Event = field(init=False, default_factory=asyncio.Event)  # set when a client disconnects

    def __post_init__(self, admins: Collection[int]) -> None:
        self.idle.set()
        self.set_admins(admins)
        self._nobody = unmapped_uid()
        self._closer = Closer()

    def __iter__(self) -> Iterator[ConnectedClient]:
        return iter(list(self._clients))

    def __len__(self) -> int:
        return len(self._clients)

    def set_admins(self, admins: Collection[int]) -> None:
        """Sets the administrators' uids. root and the daemon's own uid always belong to them."""
        self._admins = {0, os.geteuid(), *admins}

    def is_admin(self, user: int) -> bool:
        return user in self._admins

    def accept(self, sock: socket.socket) -> None:
        """Accepts a connection, or closes it: if its user has the most connections allowed, or if the kernel cannot map
        its user."""
        user = Peer.of(sock).user
        if user == self._nobody:
            self._refuse(sock, user)
        elif self._connections[user] >= self.limits.connections_per_user:
            log.warning("too_many_connections user=%d limit=%d", user, self.limits.connections_per_user)
            self.accounts_of(user).traffic.hang_up(sock)
        else:
            self._connections[user] += 1
            self._clients.add(ConnectedClient(sock, self))

    def authenticate(self, client: ConnectedClient, token: str) -> Bearer:
        """Finds the bearer of a token and counts the client's connection for that principal from now on. Raises
        NotAuthenticated, QuotaExceeded."""
        bearer = self._tokens.authenticate(token)
        limit, used = self.limits.connections_per_user, self._connections[bearer.user]
        if bearer.user != client.user and used >= limit:
            told = f"you have {used:,} connections, and limits.connections_per_user is {limit:,}: close some"
            raise QuotaExceeded(told, quota="connections", rule="", limit=limit, used=used)
        self._connections[client.user] -= 1
        self._connections[bearer.user] += 1
        return bearer

    def name_of(self, user: int) -> str:
        return self._tokens.name_of(user)

    def _refuse(self, sock: socket.socket, user: int) -> None:
        log.warning("unmapped_user user=%d", user)
        with suppress(OSError):
            sock.setblocking(False)
            sock.send(encode(Failure(id=0, code=NotPermitted.code, message=UNKNOWN)), socket.MSG_NOSIGNAL)
        self.accounts_of(user).traffic.hang_up(sock)

    def accounts_of(self, user: int) -> Accounts:
        accounts = self._accounts.get(user)
        if accounts is None:
            tenant, lane = self._tenant_of(user), self._closer.lane
            accounts = Accounts(tenant, Traffic(tenant.ledger, lane()), Windows(tenant.ledger, lane()))
            self._accounts[user] = accounts
        return accounts

    @property
    def counted(self) -> dict[int, int]:
        """Number of connections by user, as limits.connections_per_user counts them."""
        return dict(+self._connections)

    @property
    def windows(self) -> int:
        """Number of windows that clients keep, as far as the server knows."""
        return sum(len(accounts.windows) for accounts in self._accounts.values())

    def begun(self) -> None:
        self.unfinished += 1
        self.idle.clear()

    def ended(self) -> None:
        self.unfinished -= 1
        if not self.unfinished:
            self.idle.set()

    def gone(self, client: ConnectedClient) -> None:
        self._clients.discard(client)
        self._connections[client.user] -= 1
        self._on_gone(client)
        self._fewer.set()

    async def close(self, at_once: bool) -> None:
        """Closes all connections, and returns when they are gone: at once, or after each client has read all its
        replies or the time for that is over."""
        for client in self:
            client.close(at_once)
        while self._clients:
            self._fewer.clear()
            await self._fewer.wait()
        for accounts in self._accounts.values():
            accounts.windows.close()
