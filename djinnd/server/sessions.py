"""The sessions of all users: who they belong to, and their tokens, which are the session. Engines have copies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from djinn_client.errors import NotPermitted, SessionBusy, SessionNotFound
from djinn_client.protocol import Class
from djinnd.config import Limits
from djinnd.server.client import Call, Client

log = logging.getLogger("djinnd.server")


@dataclass(slots=True, eq=False)
class SessionRecord:
    """`tokens`: every prompt's and every generated token that stays. Times are CLOCK_MONOTONIC."""

    id: str
    user: int
    model: str
    priority: Class
    created: float
    used: float
    tokens: list[int] = field(default_factory=list)
    attached: set[Client] = field(default_factory=set)
    call: Call | None = None  # that works on it
    grace: asyncio.TimerHandle | None = None  # runs while nobody is attached

    @contextmanager
    def in_use(self, call: Call) -> Iterator[None]:
        """For the length of one call. Raises SessionBusy."""
        self.expect_idle()
        self.call = call
        try:
            yield
        finally:
            self.call = None
            self.used = time.monotonic()

    def expect_idle(self) -> None:
        if self.call is not None:
            raise SessionBusy(f"session {self.id} is at work on another call: wait for it, or open a second session")


class SessionTable:
    """`on_close` is called with each session that goes, when the table has it no more."""

    def __init__(self, limits: Limits, on_close: Callable[[SessionRecord], None]) -> None:
        self._limits = limits
        self._on_close = on_close
        self._sessions: dict[str, SessionRecord] = {}

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def visible(self, client: Client) -> list[SessionRecord]:
        """The client's own; all of them for an administrator."""
        return [s for s in self if s.user == client.user or client.is_admin]

    def of_model(self, model: str) -> list[SessionRecord]:
        return [s for s in self if s.model == model]

    def lookup(self, session_id: str, client: Client) -> SessionRecord:
        """Raises SessionNotFound; the answer is the same for unknown sessions and other users'."""
        session = self._sessions.get(session_id)
        if session is None or (session.user != client.user and not client.is_admin):
            raise SessionNotFound(f"there is no session {session_id[:64]!r}: open a new one", session=session_id[:64])
        return session

    def expect_room(self, user: int) -> None:
        """Raises NotPermitted where the user, or the daemon, has all sessions that it may have."""
        own = sum(s.user == user for s in self._sessions.values())
        if own >= self._limits.sessions_per_user:
            raise NotPermitted(f"you have {own:,} sessions, the limit of one user: close some", sessions=own)
        if len(self) >= self._limits.sessions:
            raise NotPermitted(f"the daemon has {len(self):,} sessions, its limit", sessions=len(self))

    def open(self, client: Client, model: str, priority: Class) -> SessionRecord:
        """Attached to the client. Raises as expect_room."""
        self.expect_room(client.user)
        now = time.monotonic()
        session = SessionRecord(secrets.token_hex(8), client.user, model, priority, created=now, used=now)
        self._sessions[session.id] = session
        self.attach(session, client)
        log.info("session_opened session=%s user=%d model=%s class=%s", session.id, client.user, model, priority)
        return session

    def attach(self, session: SessionRecord, client: Client) -> None:
        session.attached.add(client)
        if session.grace is not None:
            session.grace.cancel()
            session.grace = None

    def detach(self, client: Client) -> None:
        """The client's connection is gone. What nobody else is attached to is closed when its grace time is over."""
        for session in self:
            if client in session.attached:
                session.attached.remove(client)
                if not session.attached:
                    loop = asyncio.get_running_loop()
                    session.grace = loop.call_later(self._limits.session_grace, self.close, session)

    def clear(self) -> None:
        for session in self:
            self.close(session)

    def close(self, session: SessionRecord) -> None:
        """A call that works on it is cancelled. Does nothing where the session is closed."""
        if self._sessions.pop(session.id, None) is None:
            return
        if session.grace is not None:
            session.grace.cancel()
        if session.call is not None:
            session.call.cancel()
        log.info("session_closed session=%s user=%d tokens=%d", session.id, session.user, len(session.tokens))
        self._on_close(session)
