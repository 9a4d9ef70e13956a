"""The sessions of all users. The server owns a session's tokens; engines have copies.

The journal stores each change (see journal.py). Sessions that an earlier daemon has left begin as detached.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator

from djinn_client.errors import NotPermitted, SessionNotFound
from djinn_client.protocol import CLASSES, Class
from djinnd.config import Limits
from djinnd.server.journal.changes import Reclassified
from djinnd.server.journal.file import JournalContent
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.space import expect_space
from djinnd.server.journal.tables.adapters import AdapterChosen
from djinnd.server.journal.tables.conversations import ConversationKept
from djinnd.server.quotas.latency import Latencies, SessionLatency
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import QuotaTable, Tenant
from djinnd.server.sessions.conversations import Conversations, ConversationState, kept_again
from djinnd.server.sessions.session import SESSION_BYTES, SessionRecord
from djinnd.server.sessions.session_adapter import SessionAdapter
from djinnd.server.wire.client import ConnectedClient

log = logging.getLogger("djinnd.server")

_SWEEP = 60.0  # seconds: the most that a session outlives its time to live


class SessionTable:
    """All open sessions. `on_close` is called with each session after it was removed from the table. `limits` may be
    replaced. `latency` is measured over all sessions, also closed ones."""

    def __init__(
        self, limits: Limits, quotas: QuotaTable, on_close: Callable[[SessionRecord], None], journal: Journal
    ) -> None:
        self.limits = limits
        self._quotas = quotas
        self._journal = journal
        self._sweep: asyncio.TimerHandle | None = None
        self._on_close = on_close
        self._sessions: dict[str, SessionRecord] = {}
        self.conversations = Conversations()
        self.latency: dict[Class, Latencies] = {name: Latencies() for name in CLASSES}

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: SessionRecord) -> bool:
        """True if the session is open."""
        return self._sessions.get(session.id) is session

    def visible(self, client: ConnectedClient) -> list[SessionRecord]:
        """The client's sessions; all sessions for an administrator."""
        return [s for s in self if s.user == client.user or client.is_admin]

    def of_model(self, model: str) -> list[SessionRecord]:
        return [s for s in self if s.model == model and s.is_servable]

    def lookup(self, session_id: str, client: ConnectedClient) -> SessionRecord:
        """Finds a client's session. Raises SessionNotFound, with the same message if the id is unknown or the session
        is another user's."""
        session = self._sessions.get(session_id)
        if session is None or (session.user != client.user and not client.is_admin):
            raise SessionNotFound(
                f"there is no session {session_id[:64]!r}: `djinnctl ps` lists yours; or open a new one",
                session=session_id[:64],
            )
        return session

    def get(self, session_id: str) -> SessionRecord | None:
        return self._sessions.get(session_id)

    def count(self, user: int) -> int:
        return sum(s.user == user for s in self._sessions.values())

    def expect_room(self, user: int, priority: Class) -> Tenant:
        """Checks that the user may open one more session of this class. Raises NotPermitted at the daemon's limits, and
        QuotaExceeded at the user's quota."""
        own, tenant = self.count(user), self.tenant(user)
        tenant.expect_session(own, priority)
        if own >= self.limits.sessions_per_user:
            raise NotPermitted(f"you have {own:,} sessions, the limit of one user: close some", sessions=own)
        if len(self) >= self.limits.sessions:
            raise NotPermitted(f"the daemon has {len(self):,} sessions, its limit", sessions=len(self))
        return tenant

    def tenant(self, user: int) -> Tenant:
        return self._quotas.tenant(user, time.monotonic())

    def make_room(self, user: int, nbytes: int, sessions: int = 0, spared: SessionRecord | None = None) -> None:
        """Closes kept sessions of the user, the longest idle first, until its limits allow these further journal bytes
        and sessions. Closes none if all of them would not be enough, and never the spared one."""
        if self._has_room(user, nbytes, sessions):
            return
        idle = [session for session in self.conversations.idle(user) if session is not spared]
        if not self._has_room(user, nbytes - sum(session.charged for session in idle), sessions - len(idle)):
            return
        for session in sorted(idle, key=lambda each: each.used):
            self.close(session)
            if self._has_room(user, nbytes, sessions):
                return

    def _has_room(self, user: int, nbytes: int, sessions: int) -> bool:
        """True if the limits allow these further journal bytes and sessions of the user."""
        tenant = self.tenant(user)
        if not tenant.ledger.has_room(JOURNAL_BYTES, nbytes):
            return False
        most = tenant.most_sessions(self.limits.sessions_per_user)
        return sessions <= 0 or (self.count(user) + sessions <= most and len(self) + sessions <= self.limits.sessions)

    def idle_bytes(self, user: int) -> int:
        """Journal bytes of the user's kept sessions that may be closed."""
        return sum(session.charged for session in self.conversations.idle(user))

    def openable(self, user: int) -> int:
        """The number of sessions that the user may open now, if kept ones are closed for them."""
        most = self.tenant(user).most_sessions(self.limits.sessions_per_user)
        return max(0, most - self.count(user) + len(self.conversations.idle(user)))

    def keep(self, session: SessionRecord, kept: ConversationState) -> None:
        """Keeps the session for the next call of its user. Closes the longest idle kept session beyond
        limits.conversations_per_user."""
        is_new, session.kept = session.kept is None, kept
        if is_new:
            self.conversations.add(session)
        self._journal.note(ConversationKept(session.id, kept.key, kept.prompt))
        while self.conversations.count(session.user) > self.limits.conversations_per_user:
            longest_idle = self.conversations.give_way(session.user)
            if longest_idle is None:
                return
            self.close(longest_idle)

    def close_kept(self, model: str) -> None:
        """Closes the model's idle sessions that only the daemon keeps."""
        for session in self.of_model(model):
            if session.kept is not None and session.call is None:
                self.close(session)

    def expect_journal(self, tenant: Tenant, nbytes: int) -> None:
        """Checks that the journal has room for these further bytes of the tenant. Raises QuotaExceeded."""
        tenant.ledger.expect_room(JOURNAL_BYTES, nbytes)
        self.expect_disk(tenant, nbytes)

    def expect_disk(self, tenant: Tenant, nbytes: int) -> None:
        """Checks that the journal's disk has room for these further bytes of the tenant. Raises QuotaExceeded."""
        reserve, free = self.limits.journal_reserve, self._journal.free(nbytes)
        self._journal.keep_small(free, reserve)
        expect_space(tenant, nbytes, self._quotas, reserve, free)

    def recomputed(self, user: int, tokens: int) -> None:
        """Charges the user for tokens that an engine has computed again."""
        now = time.monotonic()
        self._quotas.tenant(user, now).charge(tokens, now)

    def restore(self, kept: JournalContent) -> None:
        """Restores the sessions of the journal, at startup. They begin as detached, also if they exceed the limits."""
        now = time.monotonic()
        for was in kept.sessions:
            age, idle = (max(0.0, kept.now - at) for at in (was.created, was.used))  # older versions wrote wall clocks
            latency, tenant = SessionLatency(self.latency), self._quotas.tenant(was.user, now)
            session = SessionRecord(
                was.id, was.user, was.model, was.priority, now - age, now - idle, self._journal, latency, tenant
            )
            session.shared = session.is_orphan = was.shared
            session.is_restored = True
            session.tokens = was.tokens.tolist()
            session.journalled = len(session.tokens)
            session.edits = kept.edits.get(was.id, session.edits)
            session.breakpoints = kept.breakpoints.get(was.id, session.breakpoints)
            if (adapter := kept.adapters.get(was.id)) is not None:
                session.adapter = SessionAdapter(adapter.name, adapter.identity)
            session.recount()
            if (hit := session.breakpoints.hit) is not None:
                if hit.end == len(session.tokens):
                    session.due_from = hit.first
                else:
                    session.breakpoints.hit = None  # a call that continued from the hit was cut short
            self._sessions[session.id] = session
            kept_as = kept.conversations.get(was.id)
            if kept_as is None:
                self._start_grace(session)
            else:
                session.kept = kept_again(kept_as.key, kept_as.prompt, session.tokens)
                self.conversations.add(session)
        self._close_expired()

    def open(
        self,
        client: ConnectedClient,
        model: str,
        priority: Class,
        shared: bool = False,
        salt: bytes = b"",
        attached: bool = True,
        adapter: SessionAdapter | None = None,
    ) -> SessionRecord:
        """Opens a session, attached to the client if `attached`. Raises the errors of expect_room."""
        self.make_room(client.user, 0 if salt else SESSION_BYTES, sessions=1)
        tenant = self.expect_room(client.user, priority)
        if not salt:
            self.expect_journal(tenant, SESSION_BYTES)
        now = time.monotonic()
        name = secrets.token_hex(8)
        latency = SessionLatency(self.latency)
        session = SessionRecord(
            name, client.user, model, priority, now, now, self._journal, latency, tenant, shared, salt, adapter
        )
        self._sessions[name] = session
        if not salt:
            self._journal.opened(session)
            if adapter is not None:
                self._journal.note(AdapterChosen(name, adapter.name, adapter.identity))
            session.charge_journal()
        if attached:
            self.attach(session, client)
        told = (session.id, client.user, client.name, model, priority)
        log.info("session_opened session=%s user=%d name=%s model=%s class=%s", *told)
        return session

    def fork(self, parent: SessionRecord, client: ConnectedClient, priority: Class | None) -> SessionRecord:
        """Opens a session with the parent's tokens, edits and breakpoints, attached to the client. Raises SessionBusy,
        NotPermitted, and the errors of expect_room. Not even an administrator may fork another user's session, because
        users share no pages."""
        parent.expect_idle()
        if parent.user != client.user:
            raise NotPermitted(f"session {parent.id} is another user's: only that user may fork it", session=parent.id)
        parent.used = time.monotonic()
        nbytes = parent.journal_bytes + SESSION_BYTES
        self.make_room(parent.user, nbytes, sessions=1, spared=parent)
        self.expect_room(parent.user, priority or parent.priority)
        self.expect_journal(parent.tenant, nbytes)
        priority = priority or parent.priority
        session = self.open(client, parent.model, priority, parent.shared, parent.salt, adapter=parent.adapter)
        session.tokens, session.is_restored = list(parent.tokens), parent.is_restored
        session.changed()
        session.inherit(parent)
        log.info("session_forked session=%s parent=%s tokens=%d", session.id, parent.id, len(session.tokens))
        return session

    def attach(self, session: SessionRecord, client: ConnectedClient) -> None:
        session.attached.add(client)
        if session.grace is not None:
            session.grace.cancel()
            session.grace = None

    def set_class(self, session: SessionRecord, priority: Class) -> None:
        """Changes the session's scheduling class. Raises QuotaExceeded if the user's quota does not allow the class."""
        session.tenant.expect_class(priority)
        if priority == session.priority:
            return
        session.priority = priority
        if not session.salt:
            self._journal.note(Reclassified(session.id, priority))
        log.info("session_class session=%s user=%d class=%s", session.id, session.user, priority)

    def detach(self, client: ConnectedClient) -> None:
        """Detaches a client after its connection has closed. A session without clients is closed when its grace time is
        over, or earlier if its user has more than limits.detached_per_user of them."""
        users = set()
        for session in self:
            if client in session.attached:
                session.attached.remove(client)
                if not session.attached:
                    self._start_grace(session)
                    users.add(session.user)
        for user in users:
            self._close_detached(user)

    def leave(self) -> None:
        """Forgets the sessions, after the journal was closed. The next daemon restores them."""
        for session in self:
            if session.grace is not None:
                session.grace.cancel()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sessions.clear()

    def close(self, session: SessionRecord) -> None:
        """Closes the session and cancels its call. Does nothing if the session is already closed."""
        if self._sessions.pop(session.id, None) is None:
            return
        if session.grace is not None:
            session.grace.cancel()
        if session.call is not None:
            session.call.cancel()
        self.conversations.remove(session)
        session.tenant.ledger.release(JOURNAL_BYTES, session.charged)
        self._journal.freed(session.charged)
        session.is_closed = True
        if not session.salt:
            self._journal.closed(session.id)
        log.info("session_closed session=%s user=%d tokens=%d", session.id, session.user, len(session.tokens))
        self._on_close(session)

    def _start_grace(self, session: SessionRecord) -> None:
        """Starts the grace time of a session without clients. A kept session has none: it needs no client."""
        if session.kept is not None:
            return
        loop = asyncio.get_running_loop()
        session.grace = loop.call_later(self.limits.session_grace, self.close, session)

    def _close_detached(self, user: int) -> None:
        """Closes the user's longest unused detached sessions beyond limits.detached_per_user. Sessions that a restart
        has left do not count: their clients are about to come back."""
        detached = [s for s in self if s.user == user and not (s.attached or s.kept or s.is_restored)]
        excess = len(detached) - self.limits.detached_per_user
        if excess > 0:
            log.info("detached_limit user=%d detached=%d closed=%d", user, len(detached), excess)
            for session in sorted(detached, key=lambda s: (s.call is not None, s.used))[:excess]:
                self.close(session)

    def _close_expired(self) -> None:
        """Closes the sessions that were not used for their time to live, and calls itself again within _SWEEP. A time
        to live of 0 means no limit; a reload may change it."""
        limit, now = self.limits.session_ttl or math.inf, time.monotonic()
        kept_limit = self.limits.conversation_ttl or math.inf
        for session in self:
            if session.call is None and session.used < now - (limit if session.kept is None else kept_limit):
                self.close(session)
        self._sweep = asyncio.get_running_loop().call_later(min(_SWEEP, limit, kept_limit), self._close_expired)
