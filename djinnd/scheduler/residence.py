"""Whose KV is on the device: sessions get pages, give them up for others, and come back.

                ┌───────── secure: pages to compute into ─────────┐
    elsewhere ──┤                                                 ├──► on the device ──leave──► leaving ──► elsewhere
                └─ found in a lower tier ──► arriving ──► arrived ┘          ▲                     │
                                                                             └─────── stay ────────┘

A session that leaves keeps its pages until they have been copied; one that arrives has no row until all have come
(arrivals.py). Nobody waits for a copy but the sessions that need it. What no tier has is computed anew from the
session's tokens. One that is parked inside the model leaves with its stage (stage_pages.py), if the host takes all of
its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from djinnd.core.session import Session
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.prefixes import Key
from djinnd.scheduler.arrivals import Arrivals
from djinnd.scheduler.elsewhere import Elsewhere
from djinnd.scheduler.stage_pages import keys_with, staged_keys
from djinnd.scheduler.useful_kv import is_an_earlier_engine_s, of_use
from djinnd.scheduler.victims import first_that_free, wanted_at


@dataclass(slots=True)
class _Departure:
    session: Session
    transfer: Transfer
    reach: int  # tokens whose KV is somewhere
    forced: bool
    staged: list[Key]  # of the pages behind those that are full of KV, where it leaves with its stage


class Residence:
    """Of one model's sessions."""

    def __init__(self, paging: Paging) -> None:
        self.kv = paging.kv
        self.paging = paging
        self.elsewhere = Elsewhere(paging)
        self.now = 0.0  # a moment ago
        self.claimed: int | None = None  # while a step is composed, pages that were refused and will be free
        self.to_leave: dict[str, Session] = {}  # idle ones, see `leave_soon`
        self._leaving: dict[str, _Departure] = {}
        self._promised = 0  # pages that are free when those have left of whom `_make_room` wanted it,
        self._promised_at = 0  # as long as pages have the same holders (KvManager.changes), and nobody of them stays
        self._arrivals = Arrivals(paging, self.elsewhere)
        self._arriving = self._arrivals.under_way  # looked up for every session in every step

    def is_leaving(self, session: Session) -> bool:
        return session.id in self._leaving

    def is_arriving(self, session: Session) -> bool:
        return session.id in self._arriving

    def is_moving(self, session: Session) -> bool:
        """It can have no row now."""
        return session.id in self._leaving or session.id in self._arriving

    @property
    def sessions_move(self) -> bool:
        """Some session does."""
        return bool(self._leaving or self._arriving)

    @property
    def anything_moves(self) -> bool:
        """Or will, without anybody's doing."""
        return self.paging.is_busy or self.paging.is_expected

    # --- pages for a session that is to run -------------------------------------------------------------------------

    def secure(self, session: Session, candidates: Iterable[Session]) -> bool:
        """Pages for all tokens that the session has, so that no prompt stops half-way for want of them, and the KV
        that is somewhere; at the cost of the first of `candidates`, where pages are short. False: it has to wait."""
        if self.paging.is_expected and is_an_earlier_engine_s(session):
            return False
        computed, lacking = session.computed, 0
        self._adopt(session)
        for _ in range(2):
            try:
                if self._arrivals.bring(session):
                    self._is_back(session, computed)
                    return False
                self.kv.reserve(session.id, session.tenant, len(session.tokens))
                self._is_back(session, computed)
                self.elsewhere.lose_stage(session)
                return True
            except OutOfPages as shortage:
                lacking = shortage.needed
                if not self._make_room(shortage, candidates):
                    break
        else:
            if self.claimed is not None:
                self.claimed += lacking
        self._trim(session, min(computed, session.computed))
        return False

    def leaves(self, tenant: int) -> bool:
        """Pages of the tenant are on their way out."""
        leaving = (departure.session.tenant for departure in self._leaving.values())
        return tenant in leaving or self.kv.leaving_pages(tenant) > 0

    def give_way(self, missing: int, tenant: int, candidates: Iterable[Session]) -> bool:
        """Has sessions of the tenant leave whose pages are `missing` together: those that do already, then the first of
        `candidates`. False: all together have fewer, and nobody has left."""
        missing -= self.kv.leaving_pages(tenant)
        if missing <= 0:
            return True
        leaving = (departure.session for departure in self._leaving.values())
        others = (other for other in candidates if not self.is_moving(other))
        own = (session for session in chain(leaving, others) if session.tenant == tenant)
        victims, _ = first_that_free(self.kv, missing, own, tenant)
        for victim in victims:
            self.leave(victim, forced=True)
        return bool(victims)

    def prefetch(self, session: Session, candidates: Iterable[Session]) -> bool:
        """Of an idle session that will run soon: brings back what is somewhere, at the cost of `candidates`. False: it
        is to be asked again when something has been copied; what it needs is on its way elsewhere, or room is made."""
        computed = session.computed
        self._adopt(session)
        self._is_back(session, computed)
        for _ in range(2):
            try:
                return not self._arrivals.bring(session) or self.is_arriving(session)
            except OutOfPages as shortage:
                if not self._make_room(shortage, candidates):
                    return True
        return False

    def make_room(self, pages: int, candidates: Iterable[Session]) -> None:
        """Of so many, beside what is claimed, as far as candidates have it."""
        self._make_room(OutOfPages(pages, self.kv.pool.free), candidates)

    def _make_room(self, shortage: OutOfPages, candidates: Iterable[Session]) -> bool:
        """Has sessions leave. False: all that may leave hold too little, and nobody has left."""
        missing = shortage.needed + (self.claimed or 0) - shortage.free - self.kv.stranded
        if missing <= 0 or (missing <= self._promised and self._promised_at == self.kv.changes):
            return True
        leaving = [departure.session for departure in self._leaving.values()]
        others = (session for session in candidates if not self.is_moving(session))
        victims, freed = first_that_free(self.kv, missing, chain(leaving, others))
        self._promised, self._promised_at = freed, self.kv.changes
        for victim in victims:
            self.leave(victim, forced=True)
        return bool(victims)

    def _adopt(self, session: Session) -> None:
        """Spares a session that is about to be given pages what the device has of its KV."""
        most, size = of_use(session), self.kv.page_size
        if most // size > session.computed // size and self.elsewhere.holds_kv_only(session):
            session.computed = self.kv.adopt(
                session.id, session.tenant, session.names, session.computed, most, session.salt
            )
            if session.left_stage is not None and session.computed > session.left_stage.computed:
                self.elsewhere.lose_stage(session)

    def _is_back(self, session: Session, computed: int) -> None:
        """It holds the pages that it has been given since it had the KV of so many tokens, and goes on to."""
        if session.computed > computed:
            self.paging.is_back(self.elsewhere.keys(session)[computed // self.kv.page_size :])

    # --- giving way -------------------------------------------------------------------------------------------------

    def leave(self, session: Session, *, sealed: bool = False, forced: bool = False) -> Transfer | None:
        """The session's pages leave the device: at once, or when they have been copied (`sealed`: and are found on the
        host). → the transfer, if there is one to wait for. Unless it is `forced`, nothing leaves where there is no
        lower tier, nor KV that cannot be computed and has not been saved. Who waits for its pages does not wait for
        the host's to be made ready, too: computing them anew takes less time, where that can be done. Nor does who
        waits for something else take the place of those who will be back before it."""
        if self.paging.host is None and not forced:
            return None
        departure = self._leaving.get(session.id)
        if departure is not None:
            departure.forced |= forced
            if not sealed:
                return departure.transfer
        else:
            if session.left_stage is not None and not (session.foreign_tokens and self.kv.pages_held(session.id)):
                self._turn_back(session)
                return None
            if not self.kv.pages_held(session.id):  # it has left
                return None
            reach = self._arrivals.reach(session)
            staged = staged_keys(session, self.kv) if self.paging.host is not None else []
            if staged:
                self.forget(session)
            else:
                self.rewind(session, session.computed)  # what holds no KV need not be copied
            departure = _Departure(session, Transfer(session.id, 0), reach, forced, staged)
        keys = self._keys_on_device(session, departure.staged)
        tokens = len(session.tokens) if departure.staged else session.computed
        if forced and not sealed and session.id not in self._leaving and self._is_wanted_last(session, keys):
            departure.transfer.failed = True
            self._departed(departure)
            return None
        can_wait = session.foreign_tokens > 0 or (not forced and (sealed or session.paused))
        departure.transfer = self.paging.save(session.id, keys, tokens, sealed=sealed, can_wait=can_wait)
        if departure.transfer.is_over:
            self._departed(departure)
            return None
        self._leaving[session.id] = departure
        return departure.transfer

    def _turn_back(self, session: Session) -> None:
        """It has left with its stage, and all that it has on the device by now has come from where it still is."""
        self._arrivals.call_off(session)
        self.kv.drop(session.id)
        session.computed, session.woken = 0, True

    def _keys_on_device(self, session: Session, staged: list[Key]) -> list[Key]:
        """Of the pages that it leaves with."""
        if staged:
            return keys_with(session, staged, self.kv)
        return self.elsewhere.keys(session) if session.computed else []

    def _is_wanted_last(self, session: Session, keys: list[Key]) -> bool:
        """After all whose pages would be nowhere any more if the host took its own: then it is its own that are
        computed anew (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
        1966)."""
        back_at = wanted_at(session, self.now)
        lost = self.paging.losses(keys, session.tenant) if back_at else None
        return lost is not None and lost != [] and self.elsewhere.are_wanted_by(lost, back_at)

    def leave_soon(self, session: Session) -> None:
        """An idle session is to leave, as nobody needs it here for now: by `depart`, if it has not to `stay` before."""
        self.to_leave[session.id] = session

    def depart(self) -> bool:
        """The first of them leaves, freely. Nobody who runs is concerned, so it may be done beside a step: between two,
        the device would wait for it, up to three milliseconds with 140 pages. → whether there are more."""
        if self.to_leave:
            session = self.to_leave.pop(next(iter(self.to_leave)))
            if session.request is None and not session.paused and self.leave_freely(session):
                session.quiet_since = None
        return bool(self.to_leave)

    def leave_freely(self, session: Session) -> bool:
        """Its pages leave as by `leave`, unless the host would have to lose what is nowhere else. False: they stay, as
        they would without a host."""
        if not self.leaves_freely(session):
            return False
        self.leave(session)
        return True

    def leaves_freely(self, session: Session) -> bool:
        """Whether nothing would be lost that is nowhere else."""
        keys = self._keys_on_device(session, staged_keys(session, self.kv))
        return not keys or self.paging.takes_freely(keys, session.tenant)

    def loses_by_leaving(self, session: Session) -> bool:
        """What it has brought through the blocks, or KV that the host does not take freely."""
        return session.stage is not None or not self.leaves_freely(session)

    def expect(self, session: Session, back_at: float) -> None:
        """That has come to be known only now, of one that may have left; 0: not any more."""
        self.elsewhere.left.expect(session.id, back_at)

    def hurry(self, session: Session) -> None:
        """A call waits for what arrives, or will in a moment."""
        self._arrivals.hurry(session)

    def stay(self, session: Session) -> None:
        """It is needed on the device after all."""
        self.to_leave.pop(session.id, None)
        self._stop_leaving(session)

    def _stop_leaving(self, session: Session) -> None:
        departure = self._leaving.pop(session.id, None)
        if departure is not None:
            self._promised = 0
            self.paging.can_spare(departure.staged)

    def _departed(self, departure: _Departure) -> None:
        session = departure.session
        if self._leaving.pop(session.id, None) is not None:
            self._promised = 0
        if session.foreign_tokens and departure.transfer.failed and not departure.forced:
            return
        self.elsewhere.forget(session)
        if departure.staged and session.stage is not None and not departure.transfer.failed:
            session.left_stage = self.elsewhere.remember_staged(session, departure.staged)
        else:
            self.paging.can_spare(departure.staged)
            if session.computed and session.computed == departure.reach:
                self.elsewhere.remember(session)
        if departure.reach:
            session.left_at = departure.reach
        session.woken = session.woken or departure.reach > 0 or bool(departure.staged)
        self.kv.drop(session.id)
        session.stage, session.computed = None, 0

    def over(self, transfer: Transfer) -> None:
        """It has ended. Whoever it was made for may have gone another way meanwhile."""
        departure = self._leaving.get(transfer.session)
        if departure is not None and departure.transfer is transfer:
            self._departed(departure)
        self._arrivals.over(transfer)

    # --- along with the session -------------------------------------------------------------------------------------

    def rewind(self, session: Session, computed: int) -> None:
        """The session goes on after its first `computed` tokens: where others hold the page that it would write into,
        at the start of that page. What was under way for it is not waited for any more, and what was on its way through
        the blocks is lost. One that has left finds again what it had left, as far as its tokens go."""
        left = None if self.kv.pages_held(session.id) else self.elsewhere.left.get(session.id)
        self.forget(session)
        self._trim(session, computed)
        if left is not None:
            self.elsewhere.revise(session, left, len(session.tokens))

    def _trim(self, session: Session, computed: int) -> None:
        session.stage = None
        session.computed = self.kv.trim(session.id, computed)

    def advance(self, session: Session, computed: int) -> None:
        """A step has brought its KV so far."""
        filled = computed // self.kv.page_size > session.computed // self.kv.page_size
        session.computed = computed
        if filled:
            self.kv.publish(session.id, session.tenant, session.names, computed, session.salt)

    def revise(self, session: Session, first: int) -> None:
        """From position `first` on, its KV will follow from something else, or there is none any more; that of the
        positions before stays where it is. With a stage: nothing is changed that this has been through."""
        if session.left_stage is not None:
            self._stop_leaving(session)
            self._arrivals.call_off(session)
            self._trim(session, min(session.computed, first))
            return
        left = self.elsewhere.left.get(session.id)
        if session.stage is None:
            self.rewind(session, min(session.computed, first))
        if left is not None:
            self.elsewhere.revise(session, left, first)

    def close(self, session: Session) -> None:
        """It is gone. Lower tiers may still be asked for what it has left there, by another that begins as it did, and
        can spare that, but for what others have left, too."""
        left = self.elsewhere.left.get(session.id)
        keys = [] if left is None else list(left.keys)
        if session.computed:
            keys += self.elsewhere.keys(session)
        self.stay(session)
        self.forget(session)
        self.kv.drop(session.id)
        leaving = set(
            chain.from_iterable(self._keys_on_device(one.session, one.staged) for one in self._leaving.values())
        )
        self.paging.can_spare([key for key in keys if key not in self.elsewhere.left and key not in leaving])

    def forget(self, session: Session) -> None:
        """No transfer changes anything about this session any more."""
        self._stop_leaving(session)
        self._arrivals.call_off(session)
        self.elsewhere.forget(session)

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.paging.check_integrity()
        self.elsewhere.check_integrity()
        self._arrivals.check_integrity()
        assert not self._leaving.keys() & self._arriving.keys(), "a session leaves and arrives"
        for departure in self._leaving.values():
            assert not departure.transfer.is_over, f"session {departure.session.id} has left"
        if self._promised and self._promised_at == self.kv.changes:
            gone = [departure.session for departure in self._leaving.values() if departure.forced]
            given = Counter(chain.from_iterable(self.kv.pages_of(session.id) for session in gone))
            freed = sum(given[page] == self.kv.holders(page) for page in given)
            assert freed >= self._promised, f"{self._promised} pages are promised, those who leave free {freed}"
