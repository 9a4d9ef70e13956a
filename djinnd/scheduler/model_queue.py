"""One model's sessions: who waits for a row, in which order, and with which pages.

    idle ──join──► active ──hold──► held ──leave──► idle
     ▲              │  ▲              │
     └────leave─────┘  └───release────┘

A release arrives anew in the line: a client that reads too slowly loses its place and delays nobody. A request of a
paused session is held, too. Who of the active has a row is composer.py's, where the pages are is residence.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from djinn_client.errors import OutOfMemory, PromptTooLong, QuotaExceeded
from djinn_client.protocol import Class
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.scheduler.composer import Composer
from djinnd.scheduler.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.policy import DEFAULT, SCARCE, Policy, eviction_order, has_gone_quiet
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.shares import Shares
from djinnd.scheduler.why import Explanation, explain

WRITTEN_AT_ONCE = 16  # pages, each time that somebody tends


@dataclass(frozen=True, slots=True)
class ModelLoad:
    sessions: int
    kv_tokens: int  # whose KV is in the pool
    pages: int
    pages_used: int


class ModelQueue:
    """A session with a request is in exactly one of `active` and `held`; one without has only pages that hold KV."""

    def __init__(
        self,
        name: str,
        kv: KvManager,
        max_context: int,
        num_blocks: int,
        paging: Paging | None = None,
        shares: Shares | None = None,
        quotas: DeviceQuotas | None = None,
        policy: Policy = DEFAULT,
    ) -> None:
        """`paging`: where there are lower tiers, or will be. `shares`, `quotas`: the device's, of all its models."""
        assert max_context <= kv.max_context
        self.name = name
        self.kv = kv
        self.residence = Residence(paging or Paging(kv))
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.sessions: dict[str, Session] = {}
        self._quotas = quotas or DeviceQuotas()
        self.composer = Composer(self.residence, num_blocks, shares or Shares(), self._quotas, policy, self._evictable)
        self.active: dict[str, Session] = {}
        self.held: dict[str, Session] = {}
        self.awaited: dict[str, Session] = {}  # whose pages are to be fetched, and cannot be yet

    @property
    def limit(self) -> int:
        """Tokens that a session can reach, alone in the pool."""
        return min(self.max_context, self.kv.capacity_tokens)

    @property
    def reach(self) -> int:
        """Tokens that the longest session can come to with the request it has."""
        return min(max((_reach(session) for session in self.sessions.values()), default=0), self.limit)

    def vacate(self, pages: int, settle: Callable[[], None] = lambda: None) -> None:
        """Leaves no more than so many pages held: sessions give theirs up in the order of eviction. `settle`: waits for
        what is being copied; nothing is when this returns."""
        self.awaited.clear()
        settle()
        for victim in list(self._evictable()):
            if self.kv.pool.used <= pages:
                return
            self.residence.leave(victim, forced=True)
            settle()

    def secure(self, session: Session) -> bool:
        """Pages for all tokens of a session without a request, whose KV is about to come from elsewhere; at the cost of
        others. False: not yet. Raises what `check_fits` does."""
        self.check_fits(session.tenant, len(session.tokens))
        if not self._quotas.make_way(session, self.residence, self._evictable):
            return False
        return self.residence.secure(session, self._evictable())

    # --- for the sake of a tenant's sessions on other models: see device_quotas.py ----------------------------------

    @property
    def pages_move(self) -> bool:
        return self.residence.anything_moves

    def claim(self, tenant: int) -> Claim | None:
        return self.composer.claim(tenant)

    def leaves(self, tenant: int) -> bool:
        return self.residence.leaves(tenant)

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        residence, kv = self.residence, self.kv
        given = 0
        for session in self._evictable():
            pages = kv.own_pages(session.id, tenant) if session.tenant == tenant else 0
            if not pages or residence.is_arriving(session) or (session.id in self.active and not active):
                continue
            residence.leave(session, forced=True)
            given += pages * kv.page_bytes
            if given >= nbytes:
                break
        return given > 0

    def _evictable(self, order: Iterable[Session] | None = None) -> Iterator[Session]:
        """Whose pages make room, first to last; lazily, as most need none. `order`: the active, where it is known."""
        idle = [self.sessions[name] for name in self.kv.sessions if name not in self.active and name not in self.held]
        order = self.composer.in_order(0.0) if order is None else order
        yield from eviction_order(idle, self.held.values(), list(order))

    def check_fits(self, tenant: int, length: int) -> None:
        """Raises PromptTooLong, OutOfMemory or QuotaExceeded for a session of so many tokens that never gets its next
        one."""
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
                f"the session needs {used:,} bytes of pages on the device for {length:,} tokens, and the quota "
                f"device_kv lets its user have {limit:,}: send a shorter prompt, or truncate the session",
                quota="device_kv",
                limit=limit,
                used=used,
            )

    def limit_of(self, tenant: int) -> int:
        """Tokens that a session of the tenant can reach."""
        most = self._quotas.most(tenant, self.kv)
        return self.limit if most is None else min(self.limit, most * self.kv.page_size)

    def join(self, session: Session, now: float = 0.0) -> None:
        session.waits, session.called, session.wakes_at, session.quiet_since = False, False, 0.0, None
        if session.paused:
            self.held[session.id] = session
            self.residence.leave(session)
        else:
            self._line_up(session, now)

    def _line_up(self, session: Session, now: float) -> None:
        self.active[session.id] = session
        self.composer.join(session, now)
        self.residence.stay(session)
        self.residence.hurry(session)

    def hold(self, session: Session) -> None:
        if session.id in self.active:
            self.held[session.id] = self.active.pop(session.id)
            self.composer.leave(session)

    def release(self, session: Session, now: float = 0.0) -> None:
        """Held by nobody any more, unless it is paused."""
        request = session.request
        if not session.paused and request is not None and request.runnable:
            self._line_up(self.held.pop(session.id), now)

    def set_class(self, session: Session, klass: Class) -> None:
        if session.id in self.active:
            self.composer.set_class(session, klass)
        else:
            session.klass = klass

    def leave(self, session: Session) -> None:
        """Its request has ended: takes the pages that hold no KV from it, unless it is parked."""
        (self.held if session.id in self.held else self.active).pop(session.id)
        self.composer.leave(session)
        if session.stage is None:
            self.rewind(session, session.computed)
        self._leave_device(session)

    def rewind(self, session: Session, computed: int) -> None:
        """See Residence.rewind."""
        self.residence.rewind(session, computed)

    def drop_stage(self, session: Session) -> None:
        """See Scheduler.drop_stage. One that was on its way out still is."""
        self.residence.elsewhere.lose_stage(session)
        if session.stage is not None:
            self.rewind(session, session.computed)
            if session.request is None or session.paused:
                self._leave_device(session)

    def revise(self, session: Session, first: int) -> None:
        """See Residence.revise; of a session without a request. One that was on its way out still is."""
        self.residence.revise(session, first)
        self._leave_device(session)

    # --- what clients say -------------------------------------------------------------------------------------------

    def wait(self, session: Session) -> None:
        """Its client waits for something else, once the request has ended that runs on it."""
        session.waits, session.called = True, False
        if session.request is None:
            self._leave_device(session)

    def _leave_device(self, session: Session) -> None:
        """An idle session: if it is paused; if it waits, soon, where it is no loss to others."""
        if session.paused:
            self.residence.leave(session)
        elif session.waits:
            self.residence.leave_soon(session)

    def wake(self, session: Session) -> None:
        """Its client will ask for something in a moment."""
        session.called, session.waits, session.wakes_at, session.quiet_since = True, False, 0.0, None
        if session.request is None and not session.paused:
            self.residence.stay(session)
            self.residence.hurry(session)
            self._fetch(session)

    def _fetch(self, session: Session) -> None:
        """Its pages come back, at the cost of those who wait."""
        if self.residence.is_moving(session) or session.stage is not None or self._is_fetched(session):
            return
        self.awaited[session.id] = session
        if session.called:
            self.residence.paging.moves.hurry_all()

    def _is_fetched(self, session: Session) -> bool:
        """Or will be, or cannot be. False: it is to be asked again when something has been copied. It may be asked
        beside a step, of whose rows nobody gives way: they have requests."""
        waiting = (other for other in self._evictable() if other.waits and other.request is None)  # lazily
        pages = self.kv.pages_for(len(session.tokens))  # others of its tenant may have computed more than it had
        excess = self._quotas.excess(session, self.kv, pages)
        if excess > 0:
            if not self.residence.give_way(excess, session.tenant, waiting):
                return True
            if self._quotas.excess(session, self.kv, pages) > 0:  # until they have been copied
                return False
        return self.residence.prefetch(session, waiting)

    def over(self, transfers: Iterable[Transfer]) -> None:
        """See Scheduler.over."""
        for transfer in transfers:
            self.residence.over(transfer)
        awaited, self.awaited = self.awaited, {}
        for session in awaited.values():
            is_idle = self.sessions.get(session.id) is session and session.request is None
            if is_idle and not session.paused and not session.waits:
                self._fetch(session)

    def pause(self, session: Session) -> Transfer | None:
        """No row until `resume`; its pages leave. → what is to be waited for until they are found on the host."""
        session.paused = True
        self.hold(session)
        return self.residence.leave(session, sealed=True)

    def resume(self, session: Session, now: float = 0.0) -> None:
        """Its pages come back; not at others' cost, as long as nobody has said that it will be asked for something."""
        session.paused = False
        if session.request is not None:
            self.release(session, now)
        else:
            session.waits, session.wakes_at, session.quiet_since = False, 0.0, None
            self.residence.stay(session)
            self._fetch(session)

    def tend(self, now: float) -> None:
        """Now and then: whose client has said nothing for long leaves, also before pages are short; so does, when they
        are scarce, who waits and has not found room on the host; whose client is expected comes back, and is not
        expected any more when it has not asked for long. Who has not found its pages, or room for them, is asked
        again."""
        self.residence.now = now
        self.over([])
        due, staying = [], []
        for session in self.sessions.values():
            if session.request is not None or session.paused:
                continue
            if session.waits:
                if session.wakes_at and now >= session.wakes_at:
                    due.append(session)
                elif session.id in self.kv.sessions and not self.residence.is_moving(session):
                    staying.append(session)
            elif session.called or (session.id in self.kv.sessions and not self.residence.is_moving(session)):
                free = self.kv.pool.free / self.kv.pool.capacity
                if session.quiet_since is None:
                    session.quiet_since = now
                elif has_gone_quiet(now - session.quiet_since, free, called=session.called):
                    self._go_quiet(session, now)
        self._make_spare_room(staying)
        for session in sorted(due, key=lambda session: session.wakes_at):
            self.wake(session)
        self.residence.paging.write_out_oldest(WRITTEN_AT_ONCE)

    def _go_quiet(self, session: Session, now: float) -> None:
        if session.called:
            session.called = False
            self.residence.expect(session, 0.0)
        if session.id not in self.kv.sessions or self.residence.is_moving(session):
            session.quiet_since = None
        else:
            session.quiet_since = now
            self.residence.leave_soon(session)

    def _make_spare_room(self, waiting: list[Session]) -> None:
        """Before somebody comes back and has to wait for it."""
        missing = SCARCE * self.kv.pool.capacity - self.kv.pool.free
        for session in eviction_order(waiting, (), []):
            if missing <= 0:
                return
            missing -= self.kv.pages_held(session.id)
            self.residence.leave_soon(session)

    def why(self, session: Session, now: float) -> Explanation:
        order, limit = self.composer.in_order(now), self.limit_of(session.tenant)
        return explain(session, self.residence, order, self.composer.served, now, limit)

    def load(self) -> ModelLoad:
        kv_tokens = sum(session.computed for session in self.sessions.values())
        return ModelLoad(len(self.sessions), kv_tokens, self.kv.pool.capacity, self.kv.pool.used)

    def check_integrity(self) -> None:
        """Asserts that sessions, requests, tables and pool agree."""
        self.residence.check_integrity()
        strangers = self.kv.sessions - self.sessions.keys()
        assert not strangers, f"{sorted(strangers)} hold pages of {self.name} and are not its sessions"
        gone = self.residence.to_leave.keys() - self.sessions.keys()
        assert not gone, f"{sorted(gone)} are to leave the device, and are no sessions of {self.name}"
        busy = {id: session.request for id, session in self.sessions.items() if session.request}
        active = {id for id, request in busy.items() if request.runnable and not self.sessions[id].paused}
        assert self.active.keys() == active, f"{sorted(active ^ self.active.keys())} of {self.name}: active or not?"
        held = busy.keys() - active
        assert self.held.keys() == held, f"{sorted(held ^ self.held.keys())} of {self.name}: held or not?"
        self.composer.check_integrity(self.active)
        tenants: dict[int, int] = {}  # by page
        for session in self.sessions.values():
            self._check_session(session)
            for page in self.kv.pages_of(session.id):
                if not self.kv.pool.is_public(page):
                    assert tenants.setdefault(page, session.tenant) == session.tenant, f"two tenants share page {page}"

    def _check_session(self, session: Session) -> None:
        name, length, computed, request = session.id, len(session.tokens), session.computed, session.request
        assert 0 <= computed <= length <= self.limit, f"session {name}: {computed} of {length} tokens computed"
        numbers = [edit.number for edit in session.edits]
        assert numbers == sorted(set(numbers)), f"session {name} has edits {numbers}"
        assert all(edit.extents for edit in session.edits), f"session {name} has an edit that changes nothing"
        if session.stage is not None:
            self._check_stage(session, session.stage)
        if session.left_stage is not None:
            assert session.stage is None and session.left_stage.length == length, f"session {name} has left otherwise"
        left = self.residence.elsewhere.left.get(name)
        staged = left is not None and left.staged > 0
        assert staged == (session.left_stage is not None), f"session {name}: {session.left_stage}, and {left}"
        pages, least, most = self.kv.pages_held(name), self.kv.pages_for(computed), self.kv.pages_for(length)
        for page in self.kv.pages_of(name)[computed // self.kv.page_size :]:
            assert self.kv.may_write(page), f"session {name} would write into page {page}, which others hold or find"
        if self.residence.is_arriving(session):
            assert pages >= least, f"session {name} arrives with {pages} pages for {computed} tokens"
            return
        if request is None:
            assert pages == (least if session.stage is None else most), (
                f"idle session {name} holds {pages} pages for {computed} tokens"
            )
            return
        assert least <= pages <= most, f"session {name} holds {pages} pages, {computed} of {length} tokens computed"
        assert computed < length, f"request {request.id} has nothing to run"
        assert 0 <= request.first <= request.prompt_end <= length, f"request {request.id}: its prompt is no part"
        generated = length - request.prompt_end
        assert generated == 0 or generated < request.max_tokens, f"request {request.id} goes on after {generated}"

    def _check_stage(self, session: Session, stage: Stage) -> None:
        name, length, to_end = session.id, len(session.tokens), self.num_blocks + 1
        assert self.kv.pages_held(name) == self.kv.pages_for(length), f"session {name} has a stage, and not its pages"
        assert not self.residence.is_arriving(session), f"session {name} has a stage, and arrives"
        assert session.computed <= stage.done < length, (
            f"session {name}: {stage}, {session.computed} of {length} tokens"
        )
        assert 0 <= stage.first <= stage.last <= to_end and stage.first < to_end, f"session {name}: {stage}"
        if session.request is None or stage.last == to_end:
            assert (stage.done, stage.last) == (session.computed, to_end), f"session {name}: {stage}"


def _reach(session: Session) -> int:
    request = session.request
    return len(session.tokens) if request is None else max(len(session.tokens), request.prompt_end + request.max_tokens)
