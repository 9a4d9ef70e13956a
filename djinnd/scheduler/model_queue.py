"""One model's sessions: who waits for a row, in which order, and with which pages.

    idle ──join──► active ──hold──► held ──leave──► idle
     ▲              │  ▲              │
     └────leave─────┘  └───release────┘

`active` is in order of arrival. A release arrives anew: a client that reads too slowly loses its place and delays
nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from djinn_client.errors import OutOfMemory, PromptTooLong
from djinnd.core.batch import Row
from djinnd.core.request import RequestState
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.scheduler.policy import Budget, eviction_order, serving_order


@dataclass(frozen=True, slots=True)
class ModelLoad:
    sessions: int
    kv_tokens: int  # whose KV is in the pool
    pages: int
    pages_used: int


class ModelQueue:
    """A session with a request is in exactly one of `active` and `held`; one without has only pages that hold KV."""

    def __init__(self, name: str, kv: KvManager, max_context: int, num_blocks: int) -> None:
        assert max_context <= kv.max_context
        self.name = name
        self.kv = kv
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.sessions: dict[str, Session] = {}
        self.active: dict[str, Session] = {}
        self.held: dict[str, Session] = {}

    @property
    def limit(self) -> int:
        """Tokens that a session can reach, alone in the pool."""
        return min(self.max_context, self.kv.capacity_tokens)

    @property
    def reach(self) -> int:
        """Tokens that the longest session can come to with the request it has."""
        return min(max((_reach(session) for session in self.sessions.values()), default=0), self.limit)

    def vacate(self, pages: int) -> None:
        """Leaves no more than so many pages held: sessions give theirs up in the order of eviction, and are computed
        anew from their tokens when they next run."""
        idle = [other for other in map(self.sessions.__getitem__, self.kv.sessions) if other.request is None]
        order = serving_order(self.active.values())
        for victim in list(eviction_order(idle, self.held.values(), order, None)):
            if self.kv.pool.used <= pages:
                return
            self._evict(victim)

    def _evict(self, victim: Session) -> None:
        self.kv.drop(victim.id)
        victim.computed = 0

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
        self.active[session.id] = session

    def hold(self, session: Session) -> None:
        self.held[session.id] = self.active.pop(session.id)

    def release(self, session: Session) -> None:
        self.active[session.id] = self.held.pop(session.id)

    def leave(self, session: Session) -> None:
        """Its request has ended: takes the pages that hold no KV from it."""
        (self.held if session.id in self.held else self.active).pop(session.id)
        self.rewind(session, session.computed)

    def rewind(self, session: Session, computed: int) -> None:
        """The session goes on after its first `computed` tokens: where others hold the page that it would write into,
        at the start of that page."""
        session.computed = self.kv.trim(session.id, computed)

    def compose(self, step: int, max_tokens: int, max_rows: int) -> tuple[Row, ...]:
        """Serves the active sessions in their order while pages and budget last; one row at least where one is
        active. Rows of one token come first.

        Once pages are short, nobody who holds none starts: those further back must not live on what the first in
        line waits for.
        """
        order = serving_order(self.active.values())
        budget = Budget(order, max_tokens, max_rows)
        rows = []
        short = False
        for session in order:
            remaining = session.remaining
            count = budget.share(remaining)
            if count == 0 or (short and not self.kv.pages_held(session.id)):
                continue
            if self._secure_pages(order, session):
                count = min(count, session.remaining)
                budget.take(remaining, count)
                rows.append(self._row(session, count, step))
            else:
                short = True
        assert rows, f"step {step}: nobody of {len(order)} active sessions of {self.name} goes on"
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

    def _secure_pages(self, order: list[Session], session: Session) -> bool:
        """Pages for all tokens that the session has, so that no prompt stops half-way for want of them; where they
        are short, at the cost of those that the policy ranks behind it. False: it has to wait, and nobody lost any."""
        computed = session.computed
        self._adopt(session)
        try:
            self.kv.reserve(session.id, session.tenant, len(session.tokens))
        except OutOfPages as shortage:
            idle = [other for other in map(self.sessions.__getitem__, self.kv.sessions) if other.request is None]
            candidates = eviction_order(idle, self.held.values(), order, session)
            victims = _first_that_free(shortage.needed - shortage.free, candidates, self.kv)
            if not victims:
                self.rewind(session, min(computed, session.computed))
                return False
            for victim in victims:
                self._evict(victim)  # it is computed anew from its tokens when it next runs
            self.kv.reserve(session.id, session.tenant, len(session.tokens))
        return True

    def _adopt(self, session: Session) -> None:
        """Spares a session that is about to be given pages the part of its prompt that its tenant has computed before.
        One token at least stays, to choose the next one, and all whose logits are wanted."""
        request, kv = session.request, self.kv
        assert request is not None
        most = len(session.tokens) - 1 if request.logits_from is None else request.logits_from
        if most // kv.page_size > session.computed // kv.page_size and (
            kv.pages_held(session.id) == kv.pages_for(session.computed)
        ):
            session.computed = kv.adopt(session.id, session.tenant, session.tokens, session.computed, most)

    def advance(self, session: Session, computed: int) -> None:
        """A step has brought its KV so far."""
        filled = computed // self.kv.page_size > session.computed // self.kv.page_size
        session.computed = computed
        if filled:
            self.kv.publish(session.id, session.tenant, session.tokens, computed)

    def load(self) -> ModelLoad:
        kv_tokens = sum(session.computed for session in self.sessions.values())
        return ModelLoad(len(self.sessions), kv_tokens, self.kv.pool.capacity, self.kv.pool.used)

    def check_integrity(self) -> None:
        """Asserts that sessions, requests, tables and pool agree."""
        self.kv.check_integrity()
        strangers = self.kv.sessions - self.sessions.keys()
        assert not strangers, f"{sorted(strangers)} hold pages of {self.name} and are not its sessions"
        busy = {id: session.request for id, session in self.sessions.items() if session.request}
        active = {id for id, request in busy.items() if request.runnable}
        assert self.active.keys() == active, f"{sorted(active ^ self.active.keys())} of {self.name}: active or not?"
        held = busy.keys() - active
        assert self.held.keys() == held, f"{sorted(held ^ self.held.keys())} of {self.name}: held or not?"
        tenants: dict[int, int] = {}  # by page
        for session in self.sessions.values():
            self._check_session(session)
            for page in self.kv.pages_of(session.id):
                assert tenants.setdefault(page, session.tenant) == session.tenant, f"two tenants share page {page}"

    def _check_session(self, session: Session) -> None:
        name, length, computed, request = session.id, len(session.tokens), session.computed, session.request
        assert 0 <= computed <= length <= self.limit, f"session {name}: {computed} of {length} tokens computed"
        pages, least, most = self.kv.pages_held(name), self.kv.pages_for(computed), self.kv.pages_for(length)
        for page in self.kv.pages_of(name)[computed // self.kv.page_size :]:
            assert self.kv.may_write(page), f"session {name} would write into page {page}, which others hold or find"
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


def _first_that_free(missing: int, candidates: Iterable[Session], kv: KvManager) -> list[Session]:
    """Of the first candidates whose pages together free `missing`, those that it takes; empty where all of them free
    fewer. A page is free when the last that holds it is a victim."""
    victims: dict[Session, list[int]] = {}
    given: Counter[int] = Counter()  # references, by page

    def is_free(page: int) -> bool:
        return given[page] == kv.pool.references(page)

    for candidate in candidates:
        pages = victims[candidate] = kv.pages_of(candidate.id)
        given.update(pages)
        missing -= sum(map(is_free, pages))
        if missing <= 0:
            return [victim for victim, pages in victims.items() if any(map(is_free, pages))]
    return []
