"""The pages that a step has for its rows, and at whose cost.

Whoever stands behind another in line gives its pages up for that one. So the first in line can have every page there
is, and always goes on. One exception, where what leaves is lost: for another prompt, who is reading one gives up
nothing before it has brought a token; that one waits for it.

Once pages are short, nobody who holds none starts: those further back must not live on what the first in line waits
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session
from djinnd.scheduler.device_quotas import DeviceQuotas
from djinnd.scheduler.line import Line
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.why import PAGES, QUOTA

Order = list[list[Session]]  # class by class, see line.py
Evictable = Callable[[Iterable[Session]], Iterable[Session]]
Test = Callable[[Session], bool]


class StepPages:
    """Of one step. Its sessions are asked in their `order`, but `turn` before all. `evictable`: see Composer."""

    def __init__(
        self,
        residence: Residence,
        quotas: DeviceQuotas,
        evictable: Evictable,
        line: Line,
        order: Order,
        turn: Session | None,
    ) -> None:
        self.kv = residence.kv
        self.moves: Test | None = residence.is_moving if residence.sessions_move else None  # None: nobody does
        self._is_returning = False  # somebody waits for room to come back into
        self.are_refused = False  # to others, for want of pages
        self.are_taken = False  # or would be, from who waits for a row, too
        self._residence = residence
        self._quotas = quotas
        self._evictable = evictable
        self._line = line
        self._order = order
        self._turn = turn
        self._victims: list[Session] | None = None  # most steps need none
        self._at_quota: set[int] = set()  # tenants
        residence.claimed = 0

    def close(self) -> None:
        """Nobody is asked any more. Who was passed over waits for what moves."""
        self._residence.claimed = None
        if self.are_refused or self._is_returning or self._at_quota:
            self._residence.paging.moves.hurry_all()

    @property
    def are_short(self) -> bool:
        return self.are_refused or self.are_taken or self._is_returning

    def suffice(self, session: Session, remaining: int) -> bool:
        """Whether it has the pages for a row. False: it is passed over."""
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
            self._make_room_for_another(session)
            return False
        is_secured = self._secured(session)
        self._note_who_moves()
        if is_secured:
            return True
        if session.passed_over == QUOTA:
            self._at_quota.add(session.tenant)
        elif not self._residence.is_arriving(session):
            self._is_returning = self._residence.elsewhere.has_some(session)
            self.are_refused = not self._is_returning
        return False

    def grow(self, session: Session) -> bool:
        """One that decodes, and whose pages are full, has the next one, if that is at nobody's cost. False: it has to
        be asked."""
        kv = self.kv
        if session.id not in kv.sessions or session.left_stage is not None or self._quotas.has_limit(session.tenant):
            return False
        length = len(session.tokens)
        if not kv.fits(session.id, length):
            if not kv.pool.free:
                return False
            kv.reserve(session.id, session.tenant, length)
        return True

    def _make_room_for_another(self, session: Session) -> None:
        """While room is made for one that comes back by a copy, it is made for the next one as well, so that what
        leaves and what comes follow each other without a pause. What is free is the first one's."""
        self.are_refused, session.passed_over = True, PAGES
        if self._residence.elsewhere.has_some(session) and not self._quotas.excess(
            session, self.kv, self._pages(session)
        ):
            self._residence.make_room(self._pages(session), self._behind(session))
            self._note_who_moves()

    def _note_who_moves(self) -> None:
        """It may have come to that just now, for the one that was asked or for its victims."""
        if self._residence.sessions_move:
            self.moves = self._residence.is_moving

    def bring_back(self, session: Session, remaining: int) -> None:
        """There is no room for what it would have to compute anew, and none is needed for what comes back."""
        if remaining > 1 and not self.are_refused and self._residence.elsewhere.has_some(session):
            self.suffice(session, remaining)

    def are_given_up_by(self, session: Session) -> bool:
        """Who could have decoded with what it held, and cannot any more."""
        return session.remaining > 1 or self._residence.is_moving(session)

    def _pages(self, session: Session) -> int:
        return self.kv.pages_for(len(session.tokens))

    def _secured(self, session: Session) -> bool:
        if not self._quotas.make_way(session, self._residence, lambda: self._behind(session)):
            session.passed_over = QUOTA
            return False
        session.passed_over = PAGES
        return self._residence.secure(session, self._behind(session))

    def _behind(self, session: Session) -> Iterator[Session]:
        """Whose pages make room for it: nobody's who stands before it, or has a row out of turn."""
        holders = self.kv.sessions
        if self._victims is None:
            self._victims = list(self._evictable(chain.from_iterable(self._order)))
        for other in self._victims:
            if other is session:
                return
            if other.id in holders and other is not self._turn and not self._is_spared(other, session):
                self.are_taken = self.are_taken or other in self._line
                yield other

    def _is_spared(self, other: Session, session: Session) -> bool:
        """Where what leaves is lost, as a stage is anywhere, two long prompts would be interrupted by each other for
        ever, by turns of their tenants or by ageing: no other of its class or a lower one interrupts one that is being
        read, and holds all that it needs for that, until it has brought a token."""
        return (
            session.remaining > 1
            and other in self._line
            and other.given < other.touched
            and self.kv.fits(other.id, len(other.tokens))
            and CLASSES.index(other.klass) <= CLASSES.index(session.klass)
            and self._residence.loses_by_leaving(other)
        )
