"""One model's sessions: which of them have requests, and which are evicted to make room.

    idle ──join──► active ──hold──► held ──leave──► idle
     ▲              │  ▲              │
     └────leave─────┘  └───release────┘

A released request joins the queue as a new one does, so a client that reads too slowly loses its place and delays no
other session. The request of a paused session is held, too. batch_builder.py decides which active sessions have a row;
kv_residency.py knows where their pages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from djinn_client.errors import OutOfMemory, PromptTooLong, QuotaExceeded
from djinn_client.protocol import Class
from djinnd.core.session import Session
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.scheduler.batch.batch_builder import BatchBuilder
from djinnd.scheduler.policy import Policy, eviction_order, has_gone_quiet
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.session_audit import check_session
from djinnd.scheduler.tuning import EVICTION
from djinnd.scheduler.turns.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.turns.shares import Shares
from djinnd.scheduler.why import Explanation, explain


class ModelQueue:
    """Invariant: a session with a request is in exactly one of `active` and `held`. A session without a request holds
    no pages beyond those with its KV, unless it has a stage."""

    def __init__(
        self,
        name: str,
        paging: Paging,
        max_context: int,
        num_blocks: int,
        shares: Shares,
        quotas: DeviceQuotas,
        policy: Policy,
    ) -> None:
        """`shares` and `quotas` are shared by all models of the device."""
        assert max_context <= paging.kv.max_context
        self.name = name
        self.kv = paging.kv
        self.residency = KvResidency(paging)
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.sessions: dict[str, Session] = {}
        self._quotas = quotas
        self.batch_builder = BatchBuilder(
            self.residency, num_blocks, shares, quotas, policy, self._evictable, self.limit_of
        )
        self.active: dict[str, Session] = {}
        self.held: dict[str, Session] = {}
        self.awaited: dict[str, Session] = {}  # sessions that wait for room before their pages can be fetched

    @property
    def limit(self) -> int:
        """The length in tokens that a session can reach if it has the pool to itself."""
        return min(self.max_context, self.kv.capacity_tokens)

    @property
    def reach(self) -> int:
        """The length in tokens that the longest session can reach with its current request."""
        return min(max((_reach(session) for session in self.sessions.values()), default=0), self.limit)

    def vacate(self, pages: int, settle: Callable[[], None] = lambda: None) -> None:
        """Evicts sessions in eviction order until at most `pages` pages are held. Call it between steps. `settle` waits
        until all copies under way have ended; when this returns, none is under way."""
        self.awaited.clear()
        settle()
        for victim in list(self._evictable()):
            if self.kv.pool.used <= pages:
                return
            self.residency.leave(victim, forced=True)
            settle()

    def secure(self, session: Session) -> bool:
        """Reserves pages for all tokens of a session without a request, into which a client's KV is about to be copied.
        Other sessions are evicted for them. Returns False if the pages are not free yet. Raises the errors of
        `check_fits`."""
        self.check_fits(session.tenant, len(session.tokens))
        if not self._quotas.make_way(session, self.residency, self._evictable):
            return False
        return self.residency.secure(session, self._evictable())

    # --- for a tenant's sessions on other models: see device_quotas.py ----------------------------------------------

    def claim(self, tenant: int) -> Claim | None:
        """The rank of the tenant's foremost session; None if it has no active session here."""
        return self.batch_builder.claim(tenant)

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        """Evicts sessions of the tenant that together hold `nbytes`, or all that can be evicted. `active`: sessions
        that wait for a row may be evicted too. Returns False if there was none to evict."""
        residency, kv = self.residency, self.kv
        given = 0
        for session in self._evictable():
            pages = kv.own_pages(session.id, tenant) if session.tenant == tenant else 0
            if not pages or residency.is_arriving(session) or (session.id in self.active and not active):
                continue
            residency.leave(session, forced=True)
            given += pages * kv.page_bytes
            if given >= nbytes:
                break
        return given > 0

    def _evictable(self, order: Iterable[Session] | None = None) -> Iterator[Session]:
        """Yields the sessions that may be evicted, first victim first; lazily, because most callers need none. `order`:
        the active sessions in serving order, if the caller knows it."""
        idle = [self.sessions[name] for name in self.kv.sessions if name not in self.active and name not in self.held]
        order = self.batch_builder.in_order(0.0) if order is None else order
        yield from eviction_order(idle, self.held.values(), list(order))

    def check_fits(self, tenant: int, length: int) -> None:
        """Raises PromptTooLong, OutOfMemory or QuotaExceeded if a session of `length` tokens could never run."""
        if length > self.max_context:
            raise PromptTooLong(
                f"the session would have {length:,} tokens, {self.name} takes {self.max_context:,}: "
                "send a shorter prompt or truncate the session",
                tokens=length,
                max_context=self.max_context,
            )
        if length > self.limit:
            pages, capacity, page_bytes = self.kv.pages_for(length), self.kv.pool.capacity, self.kv.page_bytes
            raise OutOfMemory(
                f"the session needs {pages:,} pages of {page_bytes / (1 << 20):.3g} MiB for {length:,} tokens, the "
                f"pool of {self.name} has {capacity:,}: send a shorter prompt or load the model with more KV memory",
                pages=pages,
                capacity=capacity,
                page_bytes=page_bytes,
            )

        most, needed = self._quotas.most(tenant, self.kv), self.kv.pages_for(length)
        if most is not None and needed > most:
            limit, used = most * self.kv.page_bytes, needed * self.kv.page_bytes
            raise QuotaExceeded(
                f"the session needs {used:,} bytes of pages on the device for {length:,} tokens, and its user's "
                f"quota device_kv allows {limit:,}: send a shorter prompt, or truncate the session",
                quota="device_kv",
                limit=limit,
                used=used,
            )

    def limit_of(self, tenant: int) -> int:
        """The length in tokens that a session of the tenant can reach."""
        most = self._quotas.most(tenant, self.kv)
        return self.limit if most is None else min(self.limit, most * self.kv.page_size)

    def join(self, session: Session, now: float = 0.0) -> None:
        """Adds a session that has got a request."""
        session.waits, session.called, session.wakes_at, session.quiet_since = False, False, 0.0, None
        if session.paused:
            self.held[session.id] = session
            self.residency.leave(session)
        else:
            self._line_up(session, now)

    def _line_up(self, session: Session, now: float) -> None:
        self.active[session.id] = session
        self.batch_builder.join(session, now)
        self.residency.stay(session)
        self.residency.hurry(session)

    def hold(self, session: Session) -> None:
        if session.id in self.active:
            self.held[session.id] = self.active.pop(session.id)
            self.batch_builder.leave(session)

    def release(self, session: Session, now: float = 0.0) -> None:
        """Moves a held session back to the active ones, unless it is paused or its request is held for another
        reason."""
        request = session.request
        if not session.paused and request is not None and request.runnable:
            self._line_up(self.held.pop(session.id), now)

    def set_class(self, session: Session, priority: Class) -> None:
        if session.id in self.active:
            self.batch_builder.set_class(session, priority)
        else:
            session.priority = priority

    def leave(self, session: Session) -> None:
        """Removes a session whose request has ended. Pages without KV are freed, unless the session is parked at a
        breakpoint."""
        (self.held if session.id in self.held else self.active).pop(session.id)
        self.batch_builder.leave(session)
        if session.stage is None:
            self.residency.rewind(session, session.computed)
        self._leave_device(session)

    def drop_stage(self, session: Session) -> None:
        """Drops the session's stage; its positions run again. If the session was leaving the device, it begins to leave
        again without the stage."""
        self.residency.lower_tiers.lose_stage(session)
        if session.stage is not None:
            self.residency.rewind(session, session.computed)
            if session.request is None or session.paused:
                self._leave_device(session)

    def revise(self, session: Session, first: int) -> None:
        """Takes back the KV of a session without a request from position `first` on, because other tokens or edits
        come before it. If the session was leaving the device, it begins to leave again."""
        self.residency.revise(session, first)
        self._leave_device(session)

    # --- what clients say -------------------------------------------------------------------------------------------

    def wait(self, session: Session) -> None:
        """Marks the session as waiting for something else. Its pages may leave once no request runs on it."""
        session.waits, session.called = True, False
        if session.request is None:
            self._leave_device(session)

    def _leave_device(self, session: Session) -> None:
        """Moves an idle session's pages off the device: at once if it is paused; soon if it waits, provided that the
        host has room."""
        if session.paused:
            self.residency.leave(session)
        elif session.waits:
            self.residency.leave_soon(session)

    def wake(self, session: Session) -> None:
        """Marks the session as about to get a request, and brings its pages back."""
        session.called, session.waits, session.wakes_at, session.quiet_since = True, False, 0.0, None
        if session.request is None and not session.paused:
            self.residency.stay(session)
            self.residency.hurry(session)
            self._fetch(session)

    def _fetch(self, session: Session) -> None:
        """Brings an idle session's pages back, evicting waiting sessions for them. If that is not possible yet, the
        session is kept in `awaited`."""
        if self.residency.is_moving(session) or session.stage is not None or self._is_fetched(session):
            return
        self.awaited[session.id] = session
        if session.called:
            self.residency.paging.moves.hurry_all()

    def _is_fetched(self, session: Session) -> bool:
        """Begins to bring the session's pages back. Returns False if that has to be tried again after some copy has
        ended, and True if the copy has begun, is not needed, or is impossible.

        May be called while a step runs: it evicts only sessions without a request, and these have no row.
        """
        waiting = (other for other in self._evictable() if other.waits and other.request is None)  # lazily
        # the device may have more of its KV than the session held: others of its tenant may have computed it
        pages = self.kv.pages_for(len(session.tokens))
        excess = self._quotas.excess(session, self.kv, pages)
        if excess > 0:
            if not self.residency.give_way(excess, session.tenant, waiting):
                return True
            if self._quotas.excess(session, self.kv, pages) > 0:  # their pages are still being copied
                return False
        return self.residency.prefetch(session, waiting)

    def over(self, transfers: Iterable[Transfer]) -> None:
        """Applies transfers that have ended, and begins those that waited for them. May be called while a step runs:
        its rows belong to sessions whose pages do not move and are not evicted here."""
        for transfer in transfers:
            self.residency.over(transfer)
        awaited, self.awaited = self.awaited, {}
        for session in awaited.values():
            is_idle = self.sessions.get(session.id) is session and session.request is None
            if is_idle and not session.paused and not session.waits:
                self._fetch(session)

    def pause(self, session: Session) -> Transfer | None:
        """Gives the session no row until `resume`, and moves its pages off the device. Returns the transfer after which
        they can be found on the host, if there is one."""
        session.paused = True
        self.hold(session)
        return self.residency.leave(session, sealed=True)

    def resume(self, session: Session, now: float = 0.0) -> None:
        """Ends a pause and brings the session's pages back. Without a request, the copy takes low priority until the
        client sends a call or a signal."""
        session.paused = False
        if session.request is not None:
            self.release(session, now)
        else:
            session.waits, session.wakes_at, session.quiet_since = False, 0.0, None
            self.residency.stay(session)
            self._fetch(session)

    def tend(self, now: float) -> None:
        """Periodic work on idle sessions, in this order:

        - Copies that could not begin are tried again.
        - Sessions that have been quiet for long leave the device, and are no longer expected.
        - If free pages are scarce, waiting sessions leave that have stayed because the host was full.
        - Sessions whose wait is expected to be over come back.
        - The oldest host pages are written to disk.
        """
        self.residency.now = now
        self.over([])
        due, staying = [], []
        for session in self.sessions.values():
            if session.request is not None or session.paused:
                continue
            if session.waits:
                if session.wakes_at and now >= session.wakes_at:
                    due.append(session)
                elif session.id in self.kv.sessions and not self.residency.is_moving(session):
                    staying.append(session)
            elif session.called or (session.id in self.kv.sessions and not self.residency.is_moving(session)):
                free = self.kv.pool.free / self.kv.pool.capacity
                if session.quiet_since is None:
                    session.quiet_since = now
                elif has_gone_quiet(now - session.quiet_since, free, called=session.called):
                    self._go_quiet(session, now)
        self._make_spare_room(staying)
        for session in sorted(due, key=lambda session: session.wakes_at):
            self.wake(session)
        self.residency.paging.write_out_oldest(EVICTION.written_at_once)

    def _go_quiet(self, session: Session, now: float) -> None:
        if session.called:
            session.called = False
            self.residency.expect(session, 0.0)
        if session.id not in self.kv.sessions or self.residency.is_moving(session):
            session.quiet_since = None
        else:
            session.quiet_since = now
            self.residency.leave_soon(session)

    def _make_spare_room(self, waiting: list[Session]) -> None:
        """Evicts waiting sessions while pages are scarce, so that a session that comes back need not wait for room."""
        missing = EVICTION.scarce * self.kv.pool.capacity - self.kv.pool.free
        for session in eviction_order(waiting, (), []):
            if missing <= 0:
                return
            missing -= self.kv.pages_held(session.id)
            self.residency.leave_soon(session)

    def why(self, session: Session, now: float) -> Explanation:
        order, limit = self.batch_builder.in_order(now), self.limit_of(session.tenant)
        return explain(session, self.residency, order, self.batch_builder.served, now, limit)

    def check_integrity(self) -> None:
        """Asserts that sessions, requests, block tables and pool agree."""
        self.residency.check_integrity()
        strangers = self.kv.sessions - self.sessions.keys()
        assert not strangers, f"{sorted(strangers)} hold pages of {self.name} and are not its sessions"
        gone = self.residency.to_leave.keys() - self.sessions.keys()
        assert not gone, f"{sorted(gone)} are marked to leave the device and are no sessions of {self.name}"
        busy = {id: session.request for id, session in self.sessions.items() if session.request}
        active = {id for id, request in busy.items() if request.runnable and not self.sessions[id].paused}
        assert self.active.keys() == active, (
            f"active sessions of {self.name} differ: {sorted(active ^ self.active.keys())}"
        )
        held = busy.keys() - active
        assert self.held.keys() == held, f"held sessions of {self.name} differ: {sorted(held ^ self.held.keys())}"
        self.batch_builder.check_integrity(self.active)
        self.batch_builder.guesses.check_integrity(self.sessions.values())
        tenants: dict[int, int] = {}  # tenant of each page
        for session in self.sessions.values():
            check_session(session, self.residency, self.limit, self.num_blocks)
            for page in self.kv.pages_of(session.id):
                if not self.kv.pool.is_public(page):
                    assert tenants.setdefault(page, session.tenant) == session.tenant, f"two tenants share page {page}"


def _reach(session: Session) -> int:
    request = session.request
    return len(session.tokens) if request is None else max(len(session.tokens), request.prompt_end + request.max_tokens)
