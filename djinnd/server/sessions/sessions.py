"""The sessions of all users. The server owns a session's tokens; engines have copies.

The journal stores each change (see journal.py). Sessions that an earlier daemon has left begin as detached.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from djinn_client.errors import ModelNotFound, NotPermitted, SessionBusy, SessionLost, SessionNotFound
from djinn_client.protocol import CLASSES, Class
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinnd.config import Limits
from djinnd.core.edits import FOREVER, Edit, now
from djinnd.server.journal.conversations import Conversed
from djinnd.server.journal.file import JournalSession
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.space import expect_space
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, SessionBreakpoint
from djinnd.server.probe_lists.edit_list import PART_BYTES, EditList, nbytes_of
from djinnd.server.quotas.latency import Latencies, SessionLatency
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import QuotaTable, Tenant
from djinnd.server.sessions.conversations import Conversations, ConversationState, kept_again
from djinnd.server.wire.client import ClientCall, ConnectedClient

log = logging.getLogger("djinnd.server")

_SWEEP = 60.0  # seconds: the most that a session outlives its time to live

# Bytes that a session is charged in the journal, without its edits.
SESSION_BYTES = 512
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class SessionRecord:
    """State of one session. Times are CLOCK_MONOTONIC.

    - `tokens`: the tokens of all prompts and all generated tokens that stay. After appending, call `changed` before the
      tokens are sent to the client.
    - `shared`: a client shares the session's model.
    - `salt`: not empty if some of its KV came from a client. Such a session is not in the journal.
    - `kept`: set if the daemon keeps it for a program that does not know sessions; see conversations.py.
    - `is_paused`: survives the loss of an engine, and ends with the daemon.
    - `woken_at`: when its client last announced a call; 0 if the client has announced a wait since.
    """

    id: str
    user: int
    model: str
    priority: Class
    created: float
    used: float
    journal: Journal
    latency: SessionLatency
    tenant: Tenant  # of `user`
    shared: bool = False
    salt: bytes = b""
    kept: ConversationState | None = None
    is_lost: bool = False  # its engine died with KV of a client, which cannot be computed again
    is_restored: bool = False  # from the journal and not used yet: the checkpoint may have changed
    is_paused: bool = False
    is_orphan: bool = False  # its shared model went with an earlier daemon; a model of that name is another one
    tokens: list[int] = field(default_factory=list)
    journalled: int = 0  # number of tokens that the journal has; see Journalled
    edits: EditList = field(default_factory=EditList)
    part_bytes: int = 0  # bytes of its edits and breakpoints in the journal
    charged: int = 0  # journal bytes that are charged to the tenant's ledger
    is_closed: bool = False
    breakpoints: BreakpointList = field(default_factory=BreakpointList)
    due_from: int = FOREVER  # the next call computes from here on at the latest; see core.Session
    woken_at: float = 0.0
    attached: set[ConnectedClient] = field(default_factory=set)
    call: ClientCall | None = None  # the call that uses the session
    grace: asyncio.TimerHandle | None = None  # runs while no client is attached

    @contextmanager
    def in_use(self, call: ClientCall) -> Iterator[None]:
        """Reserves the session for one call. Raises SessionBusy."""
        self.expect_idle()
        self.call = call
        try:
            yield
        finally:
            self.call = None
            self.used = time.monotonic()
            self.charge_journal()

    def called(self, received: float) -> None:
        """Starts the latency measurement of a call that was received at `received` and is about to run."""
        self.latency.called(received, self.woken_at if self.woken_at > self.used else received)

    def changed(self) -> None:
        """Tells the journal that tokens were appended. Does nothing if the journal has them all."""
        if not self.salt and len(self.tokens) > self.journalled:
            self.journal.changed(self)

    @property
    def journal_bytes(self) -> int:
        """Bytes that the session takes in the journal."""
        if self.salt:
            return 0
        return SESSION_BYTES + TOKEN_BYTES * len(self.tokens) + self.part_bytes

    def charge_journal(self) -> None:
        """Charges the tenant for the session's present size in the journal. The caller has checked that there is room.
        A call's tokens are charged when the call ends, so that a step of many sessions takes no longer."""
        if self.is_closed:
            return
        grown = self.journal_bytes - self.charged
        self.charged += grown
        if grown > 0:
            self.tenant.ledger.add(JOURNAL_BYTES, grown)
        elif grown < 0:
            self.tenant.ledger.release(JOURNAL_BYTES, -grown)
            self.journal.freed(-grown)

    @property
    def fixed(self) -> int:
        """Number of first tokens that cannot be edited: their KV may have come from a client, and cannot be computed
        again. KV behind a breakpoint's hit was computed here."""
        if not self.salt:
            return 0
        last, hit = now(len(self.tokens)), self.breakpoints.hit
        return last if hit is None else min(last, hit.first)

    def add_edit(self, edit: Edit, names: Sequence[str]) -> None:
        self.edits.add(edit, names)
        self._add_part_bytes(nbytes_of(edit, names))
        self.due_from = min(self.due_from, edit.first)
        if not self.salt:
            self.journal.edited(self.id, edit, names)

    def inherit(self, parent: SessionRecord) -> None:
        """Copies the parent's edits and breakpoints to this session, a new fork."""
        self.edits, self.breakpoints, self.due_from = parent.edits.copy(), parent.breakpoints.copy(), parent.due_from
        self._add_part_bytes(parent.part_bytes)
        if not self.salt:
            for edit in self.edits.edits:
                self.journal.edited(self.id, edit, self.edits.names[edit.number])
            for breakpoint in self.breakpoints.breakpoints:
                self.journal.broken(self.id, breakpoint)

    def end_edits(self, numbers: Collection[int], at: int) -> None:
        self.edits.end(numbers, at)
        self.recount()
        self.due_from = min(self.due_from, at)
        if not self.salt:
            self.journal.edits_ended(self.id, numbers, at)

    def recount(self) -> None:
        """Updates the size in the journal after edits or breakpoints were restored or removed."""
        self.part_bytes = self.edits.nbytes + PART_BYTES * self.breakpoints.count
        self.charge_journal()

    def _add_part_bytes(self, nbytes: int) -> None:
        self.part_bytes += nbytes
        self.charge_journal()

    def add_breakpoint(self, breakpoint: SessionBreakpoint) -> None:
        self.breakpoints.add(breakpoint)
        self._add_part_bytes(PART_BYTES * breakpoint.count)
        if not self.salt:
            self.journal.broken(self.id, breakpoint)

    def end_breakpoints(self, numbers: Collection[int]) -> None:
        self.breakpoints.end(numbers)
        self.recount()
        if not self.salt:
            self.journal.breakpoints_ended(self.id, numbers)

    def stopped(self, hit: HitInfo | None) -> None:
        """Records where the last call stopped at a breakpoint; None if the session is at no breakpoint."""
        self.breakpoints.hit = hit
        if hit is not None:
            self.due_from = hit.first
        if not self.salt:
            self.journal.stopped(self.id, hit)

    def cut(self, length: int) -> None:
        if length < len(self.tokens) and self.breakpoints.hit is not None:
            self.stopped(None)
        del self.tokens[length:]
        if self.edits.cut(length):
            self.recount()
            if not self.salt:
                self.journal.edits_cut(self.id, length)
        if length < self.journalled:
            self.journalled = length
            self.journal.changed(self)
        self.charge_journal()

    def expect_idle(self) -> None:
        if self.call is not None:
            raise SessionBusy(f"session {self.id} is busy with another call: wait for it, or open a second session")

    @property
    def is_free(self) -> bool:
        """True if a conversation may continue on this session."""
        return self.call is None and self.is_servable and not self.is_paused

    @property
    def is_plain(self) -> bool:
        """True if its output follows from its tokens alone."""
        return not (self.edits.edits or self.breakpoints.breakpoints or self.salt)

    @property
    def is_servable(self) -> bool:
        """False if no engine can serve it any more."""
        return not (self.is_orphan or self.is_lost)

    def expect_model(self) -> None:
        """Raises ModelNotFound or SessionLost if the session is not servable."""
        if self.is_lost:
            raise SessionLost(
                f"session {self.id} had KV from a client, which was lost with the engine: read its tokens, and hand "
                "the KV over again, or continue with the tokens in a new session",
                session=self.id,
            )
        if self.is_orphan:
            raise ModelNotFound(
                f"{self.model} was shared by a client and was lost with an earlier djinnd: read this session's tokens, "
                "and continue with them in a new session",
                model=self.model,
            )


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
        self.conversations: Conversations[SessionRecord] = Conversations()
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
        own, tenant = self.count(user), self._quotas.tenant(user, time.monotonic())
        tenant.expect_session(own, priority)
        if own >= self.limits.sessions_per_user:
            raise NotPermitted(f"you have {own:,} sessions, the limit of one user: close some", sessions=own)
        if len(self) >= self.limits.sessions:
            raise NotPermitted(f"the daemon has {len(self):,} sessions, its limit", sessions=len(self))
        return tenant

    def tenant(self, user: int) -> Tenant:
        return self._quotas.tenant(user, time.monotonic())

    def make_room(self, user: int, nbytes: int, sessions: int = 0, spared: SessionRecord | None = None) -> None:
        """Closes kept sessions of the user, the longest idle first, until its limits allow so many more journal bytes
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
        """Whether the limits allow so many more journal bytes and sessions of the user."""
        tenant = self._quotas.tenant(user, time.monotonic())
        if not tenant.ledger.has_room(JOURNAL_BYTES, nbytes):
            return False
        most = tenant.most_sessions(self.limits.sessions_per_user)
        return sessions <= 0 or (self.count(user) + sessions <= most and len(self) + sessions <= self.limits.sessions)

    def idle_bytes(self, user: int) -> int:
        """Journal bytes of the user's sessions that may give way."""
        return sum(session.charged for session in self.conversations.idle(user))

    def openable(self, user: int) -> int:
        """Sessions that the user may open now, where kept ones give way."""
        most = self.tenant(user).most_sessions(self.limits.sessions_per_user)
        return max(0, most - self.count(user) + len(self.conversations.idle(user)))

    def keep(self, session: SessionRecord, kept: ConversationState) -> None:
        """Keeps the session for the next call of its user. Closes the longest idle kept session beyond
        limits.conversations_per_user."""
        is_new, session.kept = session.kept is None, kept
        if is_new:
            self.conversations.add(session)
        self._journal.conversed(session.id, kept.key, kept.prompt)
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
        """Checks that the journal has room for so many more bytes of the tenant. Raises QuotaExceeded."""
        tenant.ledger.expect_room(JOURNAL_BYTES, nbytes)
        self.expect_disk(tenant, nbytes)

    def expect_disk(self, tenant: Tenant, nbytes: int) -> None:
        """The journal's disk has room for so many bytes more of the tenant's. Raises QuotaExceeded."""
        reserve, free = self.limits.journal_reserve, self._journal.free(nbytes)
        self._journal.keep_small(free, reserve)
        expect_space(tenant, nbytes, self._quotas, reserve, free)

    def recomputed(self, user: int, tokens: int) -> None:
        """Charges the user for tokens that an engine has computed again."""
        now = time.monotonic()
        self._quotas.tenant(user, now).charge(tokens, now)

    def restore(
        self,
        kept: Iterable[JournalSession],
        edits: Mapping[str, EditList],
        breakpoints: Mapping[str, BreakpointList],
        clock: float,
        conversations: Mapping[str, Conversed] | None = None,
    ) -> None:
        """Restores the sessions of the journal, at startup. They begin as detached, also if they exceed the limits.
        Edits, breakpoints and conversations are keyed by session id. `clock` is the journal's time."""
        now = time.monotonic()
        for was in kept:
            age, idle = max(0.0, clock - was.created), max(0.0, clock - was.used)  # older versions wrote wall clocks
            latency, tenant = SessionLatency(self.latency), self._quotas.tenant(was.user, now)
            session = SessionRecord(
                was.id, was.user, was.model, was.priority, now - age, now - idle, self._journal, latency, tenant
            )
            session.shared = session.is_orphan = was.shared
            session.is_restored = True
            session.tokens = was.tokens.tolist()
            session.journalled = len(session.tokens)
            session.edits = edits.get(was.id, session.edits)
            session.breakpoints = breakpoints.get(was.id, session.breakpoints)
            session.recount()
            if (hit := session.breakpoints.hit) is not None:
                if hit.end == len(session.tokens):
                    session.due_from = hit.first
                else:
                    session.breakpoints.hit = None  # a call that continued from the hit was cut short
            self._sessions[session.id] = session
            conversed = (conversations or {}).get(was.id)
            if conversed is None:
                self._start_grace(session)
            else:
                session.kept = kept_again(conversed.key, conversed.prompt, session.tokens)
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
            name, client.user, model, priority, now, now, self._journal, latency, tenant, shared, salt
        )
        self._sessions[name] = session
        if not salt:
            self._journal.opened(session)
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
        session = self.open(client, parent.model, priority or parent.priority, parent.shared, parent.salt)
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
            self._journal.reclassified(session)
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
            self._journal.closed(session)
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
