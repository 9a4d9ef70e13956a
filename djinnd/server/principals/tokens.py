"""Manages the tokens on the event loop: checks them at each Hello, changes them for administrators, and writes them.

A change is on disk before its sender gets the reply. `beat` is called about once a second: it closes connections with
expired tokens, and logs how many guesses were refused. At most once a minute it writes when tokens were last used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from djinn_client.errors import InvalidRequest, NotAuthenticated, Retry
from djinn_client.protocol.fields.scheduling import Class
from djinn_client.protocol.info import TokenInfo
from djinn_client.protocol.requests import AddToken
from djinnd.config import Limits
from djinnd.config.principals import is_unix_user
from djinnd.config.units import MAX_SECONDS
from djinnd.server.principals.book import AccessToken, TokenBook, TokenFileContent, new_token
from djinnd.server.principals.file import TokenFile
from djinnd.server.principals.names import is_unix_name, uid_of, unix_name
from djinnd.server.system.peers import unmapped_uid

log = logging.getLogger("djinnd.server")

T = TypeVar("T")

WRITE_USES_EVERY = 60.0  # seconds
TELL_REFUSALS_EVERY = 10.0  # seconds: a flood of guesses must not fill the log

REFUSED = "this token is not valid: have an administrator give you one (`djinnctl token add`)"
REVOKED = "the token of this connection is valid no longer: have an administrator give you another one"


class Bearer(NamedTuple):
    """A connection that has shown a token: its principal, and the highest class that it may use (None: any)."""

    token: str  # its name
    user: int
    highest_class: Class | None


class TokenConnection(Protocol):
    """A client's connection. `bearer` is None if it has shown no token."""

    bearer: Bearer | None

    def dismiss(self, error: NotAuthenticated) -> None:
        """Closes the connection and cancels its calls."""


class Tokens:
    """All tokens, with the file that keeps them. `connections` returns all open connections. `limits` may be
    replaced."""

    def __init__(self, state_dir: str, limits: Limits, connections: Callable[[], Iterable[TokenConnection]]) -> None:
        self.limits = limits
        self._file = TokenFile(state_dir)
        self._connections = connections
        self._book = TokenBook(TokenFileContent())
        self._nobody = unmapped_uid()
        self._writing = asyncio.Lock()
        self._wants_writing = False  # the book has changes that the file lacks
        self._changes: set[asyncio.Task[Any]] = set()  # under way
        self._written_at = time.monotonic()
        self._refused = 0  # since the last line in the log
        self._told_at = -TELL_REFUSALS_EVERY

    def start(self) -> None:
        """Reads the file. Raises StartError."""
        self._book = TokenBook(self._file.read())

    async def close(self) -> None:
        """Returns when all changes are written, or their write has failed."""
        if self._changes:
            await asyncio.wait(self._changes)
        await self._write_if_wanted()

    @property
    def notes(self) -> list[str]:
        """Notes for administrators."""
        return self._file.notes

    def name_of(self, principal: int) -> str:
        """The principal's name, or its number if it has no known name."""
        if is_unix_user(principal):
            return unix_name(principal)
        return self._book.name_of(principal) or str(principal)

    def has_name(self, name: str) -> bool:
        return self._book.get(name) is not None

    # --- connections ------------------------------------------------------------------------------------------------

    def authenticate(self, secret: str) -> Bearer:
        """Finds the principal of a token. Raises NotAuthenticated."""
        now = time.time()
        token = self._book.find(secret, now)
        if token is None:
            self._refused += 1
            self._tell_refusals()
            raise NotAuthenticated(REFUSED)
        self._book.used(token, now)
        self._wants_writing = True
        return Bearer(token.name, token.principal, token.highest_class)

    def beat(self) -> None:
        now = time.time()
        for connection in self._connections():
            if (bearer := connection.bearer) is not None:
                token = self._book.get(bearer.token)
                if token is None or token.is_expired(now):
                    connection.dismiss(NotAuthenticated(REVOKED))
        self._tell_refusals()
        if self._wants_writing and time.monotonic() - self._written_at >= WRITE_USES_EVERY:
            self._written_at = time.monotonic()
            self._begin(self._write_if_wanted())

    def _tell_refusals(self) -> None:
        now = time.monotonic()
        if self._refused and now - self._told_at >= TELL_REFUSALS_EVERY:
            log.warning("tokens_refused count=%d", self._refused)
            self._refused, self._told_at = 0, now

    # --- requests of administrators ---------------------------------------------------------------------------------

    async def add(self, request: AddToken) -> tuple[str, TokenInfo]:
        """Adds a token and returns its secret, which is stored nowhere. If the caller goes away meanwhile, the secret
        is lost and the token stays. Raises InvalidRequest, QuotaExceeded, Retry."""
        if not 0 <= request.expires_s <= MAX_SECONDS:  # NaN is neither
            raise InvalidRequest(f"expires_s is {request.expires_s:g}; it must be 0 (never) or at most {MAX_SECONDS:g}")
        return await asyncio.shield(self._begin(self._add(request)))

    async def _add(self, request: AddToken) -> tuple[str, TokenInfo]:
        user, seconds, now = await self._user_of(request), request.expires_s, time.time()
        async with self._writing:
            self._book.expect_new(request.name, self.limits.tokens)
            expires = now + seconds if seconds else None
            token, secret = new_token(request.name, user, request.highest_class, now, expires)
            try:
                await self._write(token)
            except OSError as error:
                raise Retry(f"the token cannot be written to {self._file.path}: {error}") from error
            self._book.add(token)
        log.info("token_added token=%s user=%d class=%s", token.name, token.principal, token.highest_class or "any")
        return secret, self._info(token)

    async def _user_of(self, request: AddToken) -> int | None:
        """The Unix user for which the new token stands; None if it stands for its own name. Raises InvalidRequest."""
        if not request.user:
            if await asyncio.to_thread(is_unix_name, request.name):
                told = f"{request.name} is a Unix user: choose another name, or give the token that user"
                raise InvalidRequest(told, field="name")
            return None
        user = await asyncio.to_thread(uid_of, request.user)
        if user == self._nobody:
            raise InvalidRequest(f"user {user} stands for all that the daemon's user namespace does not map")
        return user

    def infos(self) -> list[TokenInfo]:
        return [self._info(token) for token in self._book]

    async def revoke(self, name: str) -> None:
        """Revokes a token at once; it is on the disk when this returns. Raises NotFound, Retry."""
        self._book.revoke(name)
        self._wants_writing = True
        log.info("token_revoked token=%s", name)
        for connection in self._connections():
            if connection.bearer is not None and connection.bearer.token == name:
                connection.dismiss(NotAuthenticated(REVOKED))
        await asyncio.shield(self._begin(self._write_without(name)))

    async def _write_without(self, name: str) -> None:
        """Writes the file after a token was revoked. Raises Retry."""
        async with self._writing:
            try:
                await self._write()
            except OSError as error:
                raise Retry(
                    f"{name} is revoked, and comes back with the next start of the daemon unless {self._file.path} can "
                    f"be written, which is tried every {WRITE_USES_EVERY:g} s: {error}"
                ) from error

    def _info(self, token: AccessToken) -> TokenInfo:
        principal = token.principal
        return TokenInfo(
            name=token.name,
            user=principal,
            user_name=self.name_of(principal),
            highest_class=token.highest_class,
            created=token.created,
            expires=token.expires,
            used=token.used,
        )

    # --- the file ---------------------------------------------------------------------------------------------------

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a change that runs to its end even if its caller goes away: two threads must not write one file."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone away
        return task

    async def _write_if_wanted(self) -> None:
        async with self._writing:
            try:
                if self._wants_writing:
                    await self._write()
            except OSError as error:
                log.warning("tokens_not_written path=%s error=%s", self._file.path, error)

    async def _write(self, *more: AccessToken) -> None:
        """Writes the book and these further tokens. The caller holds the lock. Raises OSError."""
        self._wants_writing = False
        try:
            await asyncio.to_thread(self._file.write, self._book.content(*more))
        except OSError:
            self._wants_writing = True
            raise
