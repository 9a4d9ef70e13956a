"""The pages of one step: which sessions get pages for a row, and which are evicted for them.

A session gets pages from sessions behind it in the queue. So the first session can have every page, and always runs.
There is one exception, if KV would be lost: a session in prefill is not evicted for another prompt before it has
produced a token, and the other session waits.

Once pages are short in a step, sessions without pages do not start. Otherwise sessions further back would take the
pages that the first in the queue waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.turns.device_quotas import DeviceQuotas
from djinnd.scheduler.turns.run_queue import RunQueue
from djinnd.scheduler.why import PAGES, QUOTA

Order = list[list[Session]]  # class by class, see run_queue.py
Evictable = Callable[[Iterable[Session]], Iterable[Session]]
Test = Callable[[Session], bool]


class StepPages:
    """The page state of one step. `order`: serving order. `turn`: a session that comes before all others. `evictable`:
    see BatchBuilder."""

    def __init__(
        self,
        residency: KvResidency,
        quotas: DeviceQuotas,
        evictable: Evictable,
        line: RunQueue,
        order: Order,
        turn: Session | None,
    ) -> None:
        self.kv = residency.kv
        self.moves: Test | None = residency.is_moving if residency.sessions_move else None  # None: no session moves
        self._is_returning = False  # some session waits for room before it can come back
        self.are_refused = False  # a session was refused pages: others that hold none do not start
        self.are_taken = False  # pages were, or would be, taken from an active session
        self._residency = residency
        self._quotas = quotas
        self._evictable = evictable
        self._run_queue = line
        self._order = order
        self._turn = turn
        self._victims: list[Session] | None = None  # computed when it is needed; most steps need none
        self._at_quota: set[int] = set()  # tenants
        residency.claimed = 0

    def close(self) -> None:
        """Ends the step. If a session was passed over for pages, all moves are hurried."""
        self._residency.claimed = None
        if self.are_refused or self._is_returning or self._at_quota:
            self._residency.paging.moves.hurry_all()

    @property
    def are_short(self) -> bool:
        return self.are_refused or self.are_taken or self._is_returning

    def suffice(self, session: Session, remaining: int) -> bool:
        """Returns True if the session has the pages for a row; else it is passed over."""
        holds_none = session.id not in self.kv.sessions
        if (self.are_refused and holds_none) or (self.moves is not None and self.moves(session)):
            session.passed_over = PAGES
            return False
        if holds_none and session.tenant in self._at_quota:
            session.passed_over = QUOTA
            return False
        if remaining == 1 and self.kv.fits(session.id, len(session.tokens)):
            return True
        if holds_none and self._is_returning:
            self._make_room_for_next(session)
            return False
        is_secured = self._is_secured(session)
        self._update_moves()
        if is_secured:
            return True
        if session.passed_over == QUOTA:
            self._at_quota.add(session.tenant)
        elif not self._residency.is_arriving(session):
            self._is_returning = self._residency.lower_tiers.has_some(session)
            self.are_refused = not self._is_returning
        return False

    def grow(self, session: Session) -> bool:
        """Gives a session that decodes its next page, if one is free and its tenant has no quota. Returns False if it
        has to go through `suffice`."""
        kv = self.kv
        if session.id not in kv.sessions or session.left_stage is not None or self._quotas.has_limit(session.tenant):
            return False
        length = len(session.tokens)
        if not kv.fits(session.id, length):
            if not kv.pool.free:
                return False
            kv.reserve(session.id, session.tenant, length)
        return True

    def _make_room_for_next(self, session: Session) -> None:
        """While room is made for one session that comes back by a copy, makes room for the next one too, so that copies
        out and in follow each other without a pause. Pages that are free belong to the first."""
        self.are_refused, session.passed_over = True, PAGES
        if self._residency.lower_tiers.has_some(session) and not self._quotas.excess(
            session, self.kv, self._pages(session)
        ):
            self._residency.make_room(self._pages(session), self._victims_for(session))
            self._update_moves()

    def _update_moves(self) -> None:
        """Updates `moves`: the session that was just considered, or its victims, may have begun to move."""
        if self._residency.sessions_move:
            self.moves = self._residency.is_moving

    def bring_back(self, session: Session, remaining: int) -> None:
        """Begins to bring back a session for which the step has no room: copying needs no room in the step."""
        if remaining > 1 and not self.are_refused and self._residency.lower_tiers.has_some(session):
            self.suffice(session, remaining)

    def are_given_up_by(self, session: Session) -> bool:
        """True if a session that could have decoded with its pages has lost them meanwhile."""
        return session.remaining > 1 or self._residency.is_moving(session)

    def _pages(self, session: Session) -> int:
        return self.kv.pages_for(len(session.tokens))

    def _is_secured(self, session: Session) -> bool:
        if not self._quotas.make_way(session, self._residency, lambda: self._victims_for(session)):
            session.passed_over = QUOTA
            return False
        session.passed_over = PAGES
        return self._residency.secure(session, self._victims_for(session))

    def _victims_for(self, session: Session) -> Iterator[Session]:
        """Yields the sessions that can be evicted for this one: none that is before it in the queue or has a row out of
        turn."""
        holders = self.kv.sessions
        if self._victims is None:
            self._victims = list(self._evictable(chain.from_iterable(self._order)))
        for other in self._victims:
            if other is session:
                return
            if other.id in holders and other is not self._turn and not self._is_protected(other, session):
                self.are_taken = self.are_taken or other in self._run_queue
                yield other

    def _is_protected(self, other: Session, session: Session) -> bool:
        """True if `other` must not be evicted for `session`: it is reading a prompt, holds all pages for it, is of the
        same class or a higher one, and would lose KV.

        Otherwise two long prompts could interrupt each other without end, by turns of their tenants or by ageing.
        """
        return (
            session.remaining > 1
            and other in self._run_queue
            and other.given < other.touched
            and self.kv.fits(other.id, len(other.tokens))
            and CLASSES.index(other.priority) <= CLASSES.index(session.priority)
            and self._residency.loses_by_leaving(other)
        )
