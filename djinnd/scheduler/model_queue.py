"""One model's sessions: who waits for a row, in which order, and with which pages.

    idle ──join──► active ──hold──► held ──leave──► idle
     ▲              │  ▲              │
     └────leave─────┘  └───release────┘

`active` is in order of arrival. A release arrives anew: a client that reads too slowly loses its place and delays
nobody. A request of a paused session is held, too. Where the pages are is residence.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from djinn_client.errors import OutOfMemory, PromptTooLong
from djinnd.core.batch import Row
from djinnd.core.request import RequestState
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Paging, Transfer
from djinnd.scheduler.policy import Budget, eviction_order, has_gone_quiet, serving_order
from djinnd.scheduler.residence import Residence

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
        self, name: str, kv: KvManager, max_context: int, num_blocks: int, paging: Paging | None = None
    ) -> None:
        """`paging`: where there are lower tiers, or will be."""
        assert max_context <= kv.max_context
        self.name = name
        self.kv = kv
        self.residence = Residence(paging or Paging(kv))
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.sessions: dict[str, Session] = {}
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
        for victim in list(self._evictable(None)):
            if self.kv.pool.used <= pages:
                return
            self.residence.leave(victim, forced=True)
            settle()

    def secure(self, session: Session) -> bool:
        """Pages for all tokens of a session without a request, whose KV is about to come from elsewhere; at the cost of
        others. False: not yet."""
        return self.residence.secure(session, self._evictable(None))

    def _evictable(self, served: Session | None) -> Iterator[Session]:
        """Whose pages make room for `served`, or for nobody in particular, first to last."""
        idle = [other for other in map(self.sessions.__getitem__, self.kv.sessions) if other.request is None]
        return eviction_order(idle, self.held.values(), serving_order(self.active.values()), served)

    def check_fits(self, length: int) -> None:
        """Raises PromptTooLong or OutOfMemory for a session of so many tokens that it can never run to its end."""
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

    def join(self, session: Session) -> None:
        session.waits, session.quiet_since = False, None
        if session.paused:
            self.held[session.id] = session
            self.residence.leave(session)
        else:
            self.active[session.id] = session
            self.residence.stay(session)

    def hold(self, session: Session) -> None:
        if session.id in self.active:
            self.held[session.id] = self.active.pop(session.id)

    def release(self, session: Session) -> None:
        """Held by nobody any more, unless it is paused."""
        request = session.request
        if not session.paused and request is not None and request.runnable:
            self.active[session.id] = self.held.pop(session.id)
            self.residence.stay(session)

    def leave(self, session: Session) -> None:
        """Its request has ended: takes the pages that hold no KV from it."""
        (self.held if session.id in self.held else self.active).pop(session.id)
        self.rewind(session, session.computed)
        if session.paused or session.waits:
            self.residence.leave(session)

    def rewind(self, session: Session, computed: int) -> None:
        """See Residence.rewind."""
        self.residence.rewind(session, computed)

    def cut(self, session: Session) -> None:
        """It has fewer tokens now, and no request. One that was on its way out still is."""
        self.rewind(session, session.computed)
        if session.paused or session.waits:
            self.residence.leave(session)

    # --- what clients say -------------------------------------------------------------------------------------------

    def wait(self, session: Session) -> None:
        """Its client waits for something else, once the request has ended that runs on it."""
        session.waits = True
        if session.request is None:
            self.residence.leave(session)

    def wake(self, session: Session) -> None:
        """Its client will ask for something in a moment."""
        session.waits, session.wakes_at, session.quiet_since = False, 0.0, None
        if session.request is None and not session.paused:
            self.residence.stay(session)
            self._fetch(session)

    def _fetch(self, session: Session) -> None:
        """Its pages come back, at the cost of those who wait."""
        if self.residence.is_moving(session):
            return
        waiting = [other for other in self._evictable(None) if other.waits]
        if not self.residence.prefetch(session, waiting):
            self.awaited[session.id] = session

    def over(self, transfers: Iterable[Transfer]) -> None:
        """These have ended, and others have gone on."""
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

    def resume(self, session: Session) -> None:
        session.paused = False
        if session.request is not None:
            self.release(session)
        else:
            self.wake(session)

    def tend(self, now: float) -> None:
        """Now and then: whose client has said nothing for long leaves, also before pages are short; whose client is
        expected comes back."""
        for session in self.sessions.values():
            if session.request is not None or session.paused:
                continue
            if session.waits:
                if session.wakes_at and now >= session.wakes_at:
                    self.wake(session)
            elif session.id in self.kv.sessions and not self.residence.is_moving(session):
                if session.quiet_since is None:
                    session.quiet_since = now
                elif has_gone_quiet(now - session.quiet_since, self.kv.pool.free / self.kv.pool.capacity):
                    self.residence.leave(session)
        self.residence.paging.write_out_oldest(WRITTEN_AT_ONCE)

    # --- the step ---------------------------------------------------------------------------------------------------

    def compose(self, step: int, max_tokens: int, max_rows: int) -> tuple[Row, ...]:
        """Serves the active sessions in their order while pages and budget last. Rows of one token come first. Nobody,
        where all wait for pages that are being copied.

        Once pages are short, nobody who holds none starts: those further back must not live on what the first in
        line waits for.
        """
        residence = self.residence
        order = [session for session in serving_order(self.active.values()) if not residence.is_moving(session)]
        if not order:
            return ()
        budget = Budget(order, max_tokens, max_rows)
        rows = []
        short = False
        for session in order:
            remaining = session.remaining
            count = budget.share(remaining)
            if count == 0 or residence.is_moving(session) or (short and not self.kv.pages_held(session.id)):
                continue
            if not residence.secure(session, self._evictable(session)):
                short = short or not residence.is_arriving(session)
            else:
                count = min(count, session.remaining)
                budget.take(remaining, count)
                rows.append(self._row(session, count, step))
        assert rows or residence.anybody_moves, (
            f"step {step}: nobody of {len(order)} active sessions of {self.name} goes on"
        )
        rows.sort(key=_is_chunk)
        return tuple(rows)

    def _row(self, session: Session, count: int, step: int) -> Row:
        request = session.request
        assert request is not None
        if request.state is RequestState.QUEUED:
            request.move("start")
        session.touched = step
        samples = request.max_tokens > 0 and count == session.remaining
        return Row(session, request, session.computed, count, 0, self.num_blocks, samples)

    def load(self) -> ModelLoad:
        kv_tokens = sum(session.computed for session in self.sessions.values())
        return ModelLoad(len(self.sessions), kv_tokens, self.kv.pool.capacity, self.kv.pool.used)

    def check_integrity(self) -> None:
        """Asserts that sessions, requests, tables and pool agree."""
        self.residence.check_integrity()
        strangers = self.kv.sessions - self.sessions.keys()
        assert not strangers, f"{sorted(strangers)} hold pages of {self.name} and are not its sessions"
        busy = {id: session.request for id, session in self.sessions.items() if session.request}
        active = {id for id, request in busy.items() if request.runnable and not self.sessions[id].paused}
        assert self.active.keys() == active, f"{sorted(active ^ self.active.keys())} of {self.name}: active or not?"
        held = busy.keys() - active
        assert self.held.keys() == held, f"{sorted(held ^ self.held.keys())} of {self.name}: held or not?"
        tenants: dict[int, int] = {}  # by page
        for session in self.sessions.values():
            self._check_session(session)
            for page in self.kv.pages_of(session.id):
                if not self.kv.pool.is_public(page):
                    assert tenants.setdefault(page, session.tenant) == session.tenant, f"two tenants share page {page}"

    def _check_session(self, session: Session) -> None:
        name, length, computed, request = session.id, len(session.tokens), session.computed, session.request
        assert 0 <= computed <= length <= self.limit, f"session {name}: {computed} of {length} tokens computed"
        pages, least, most = self.kv.pages_held(name), self.kv.pages_for(computed), self.kv.pages_for(length)
        for page in self.kv.pages_of(name)[computed // self.kv.page_size :]:
            assert self.kv.may_write(page), f"session {name} would write into page {page}, which others hold or find"
        if self.residence.is_arriving(session):
            assert pages >= least, f"session {name} arrives with {pages} pages for {computed} tokens"
            return
        if request is None:
            assert pages == least, f"idle session {name} holds {pages} pages for {computed} tokens"
            return
        assert least <= pages <= most, f"session {name} holds {pages} pages, {computed} of {length} tokens computed"
        assert computed < length, f"request {request.id} has nothing to run"
        assert 0 <= request.first <= request.prompt_end <= length, f"request {request.id}: its prompt is no part"
        generated = length - request.prompt_end
        assert generated == 0 or generated < request.max_tokens, f"request {request.id} goes on after {generated}"


def _reach(session: Session) -> int:
    request = session.request
    return len(session.tokens) if request is None else max(len(session.tokens), request.prompt_end + request.max_tokens)


def _is_chunk(row: Row) -> bool:
    return row.count > 1
