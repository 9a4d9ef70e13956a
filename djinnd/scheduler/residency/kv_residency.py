"""Moves sessions on and off the device: they get pages, are evicted, and come back.

                ┌───────── secure: pages to compute into ─────────┐
    elsewhere ──┤                                                 ├──► on the device ──leave──► leaving ──► elsewhere
                └─ found in a lower tier ──► arriving ──► arrived ┘          ▲                     │
                                                                             └─────── stay ────────┘

A session that leaves keeps its pages until they have been copied. A session that arrives has no row until all of its
pages have come (arrivals.py). A copy delays only the sessions that need it. KV that no tier has is recomputed from the
session's tokens. A session that is parked at a breakpoint leaves with its stage (reusable_kv.py), if the host takes
all of its pages.
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
from djinnd.scheduler.residency.arrivals import Arrivals
from djinnd.scheduler.residency.eviction import first_that_free, wanted_at
from djinnd.scheduler.residency.lower_tiers import LowerTiers
from djinnd.scheduler.residency.reusable_kv import comes_from_an_earlier_engine, keys_with, staged_keys, usable_tokens


@dataclass(slots=True)
class _Departure:
    """A session that is leaving. `forced`: it was evicted, and leaves even if its pages cannot be saved."""

    session: Session
    transfer: Transfer
    reach: int  # tokens with KV on the device or in a lower tier
    forced: bool
    staged: list[Key]  # if it leaves with its stage: keys of its last pages, which are not full of KV


class KvResidency:
    """The pages of one model's sessions."""

    def __init__(self, paging: Paging) -> None:
        self.kv = paging.kv
        self.paging = paging
        self.lower_tiers = LowerTiers(paging)
        self.now = 0.0  # the time of the last `tend`
        # Pages that are being freed for sessions refused in this step; None while no step is composed.
        self.claimed: int | None = None
        self.to_leave: dict[str, Session] = {}  # idle sessions, see `leave_soon`
        self._leaving: dict[str, _Departure] = {}
        # Pages that will be free when the sessions that `_make_room` evicted have left. It spares most searches for
        # victims. Measured with 1,000 sessions and half of the pages: a decision's p99 is 9 to 15 ms, without it 29 to
        # 55.
        self._promised = 0
        self._promised_at = 0  # `_promised` holds while KvManager.changes has this value and these sessions leave
        self._arrivals = Arrivals(paging, self.lower_tiers)
        self._arriving = self._arrivals.under_way  # an alias, because it is looked up for every session in every step

    def is_leaving(self, session: Session) -> bool:
        return session.id in self._leaving

    def is_arriving(self, session: Session) -> bool:
        return session.id in self._arriving

    def is_moving(self, session: Session) -> bool:
        """True if the session's pages are arriving or leaving, so that it cannot have a row."""
        return session.id in self._leaving or session.id in self._arriving

    @property
    def sessions_move(self) -> bool:
        """True if some session is arriving or leaving."""
        return bool(self._leaving or self._arriving)

    @property
    def anything_moves(self) -> bool:
        """True if a page is being copied, or will be without another event here."""
        return self.paging.is_busy or self.paging.is_expected

    # --- pages for a session that is to run -------------------------------------------------------------------------

    def secure(self, session: Session, candidates: Iterable[Session]) -> bool:
        """Gives the session pages for all of its tokens, so that no prompt stops half-way for want of pages, and brings
        back its KV. If pages are short, evicts the first of `candidates`. Returns False if the session has to wait."""
        if self.paging.is_expected and comes_from_an_earlier_engine(session):
            return False
        computed, lacking = session.computed, 0
        self._adopt(session)
        for _ in range(2):
            try:
                if self._arrivals.bring(session):
                    self._spare_on_host(session, computed)
                    return False
                self.kv.reserve(session.id, session.tenant, len(session.tokens))
                self._spare_on_host(session, computed)
                self.lower_tiers.lose_stage(session)
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
        """True if pages of the tenant are leaving the device."""
        leaving = (departure.session.tenant for departure in self._leaving.values())
        return tenant in leaving or self.kv.leaving_pages(tenant) > 0

    def give_way(self, missing: int, tenant: int, candidates: Iterable[Session]) -> bool:
        """Evicts sessions of the tenant until `missing` of its pages are free: sessions that are leaving count first,
        then the first of `candidates`. Returns False, and evicts none, if all of them together have fewer."""
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
        """Brings back the KV of an idle session that will run soon, evicting `candidates` for it. Returns False if that
        has to be tried again after some copy has ended."""
        computed = session.computed
        self._adopt(session)
        self._spare_on_host(session, computed)
        for _ in range(2):
            try:
                return not self._arrivals.bring(session) or self.is_arriving(session)
            except OutOfPages as shortage:
                if not self._make_room(shortage, candidates):
                    return True
        return False

    def make_room(self, pages: int, candidates: Iterable[Session]) -> None:
        """Evicts candidates until `pages` pages are free beside the claimed ones, or no candidate is left."""
        self._make_room(OutOfPages(pages, self.kv.pool.free), candidates)

    def _make_room(self, shortage: OutOfPages, candidates: Iterable[Session]) -> bool:
        """Evicts the first candidates that end the shortage. Returns False, and evicts none, if all of them hold too
        little."""
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
        """Before the session is given pages, shares with it the pages on the device that hold its next KV."""
        most, size = usable_tokens(session), self.kv.page_size
        if most // size > session.computed // size and self.lower_tiers.holds_kv_only(session):
            session.computed = self.kv.adopt(
                session.id, session.tenant, session.names, session.computed, most, session.page_salt
            )
            if session.left_stage is not None and session.computed > session.left_stage.computed:
                self.lower_tiers.lose_stage(session)

    def _spare_on_host(self, session: Session, computed: int) -> None:
        """Lets the host spare its copies of the pages that the session got back since it had `computed` tokens of
        KV."""
        if session.computed > computed:
            self.paging.mark_returned(self.lower_tiers.keys(session)[computed // self.kv.page_size :])

    # --- giving way -------------------------------------------------------------------------------------------------

    def leave(self, session: Session, *, sealed: bool = False, forced: bool = False) -> Transfer | None:
        """Moves the session's pages off the device. Returns the transfer, if there is one to wait for.

        The pages are free when they have been copied; with `sealed`, the transfer ends when they can also be found on
        the host. With `forced`, the session leaves even if its pages cannot be saved. Otherwise it stays if there is no
        lower tier, or if KV that cannot be recomputed has not been saved.

        An eviction does not wait for host slots that are not ready if the KV can be recomputed, because that takes less
        time. An evicted session also saves nothing if its copy would push out pages of sessions that are expected back
        earlier (`_is_expected_last`).
        """
        if self.paging.host is None and not forced:
            return None
        departure = self._leaving.get(session.id)
        if departure is not None:
            departure.forced |= forced
            if not sealed:
                return departure.transfer
        else:
            if session.left_stage is not None and not (session.foreign_tokens and self.kv.pages_held(session.id)):
                self._drop_device_pages(session)
                return None
            if not self.kv.pages_held(session.id):  # it has left already
                return None
            reach = self._arrivals.reach(session)
            staged = staged_keys(session, self.kv) if self.paging.host is not None else []
            if staged:
                self.forget(session)
            else:
                self.rewind(session, session.computed)  # pages without KV need not be copied
            departure = _Departure(session, Transfer(session.id, 0), reach, forced, staged)
        keys = self._keys_on_device(session, departure.staged)
        tokens = len(session.tokens) if departure.staged else session.computed
        if forced and not sealed and session.id not in self._leaving and self._is_expected_last(session, keys):
            departure.transfer.failed = True
            self._finish_leaving(departure)
            return None
        can_wait = session.foreign_tokens > 0 or (not forced and (sealed or session.paused))
        departure.transfer = self.paging.save(session.id, keys, tokens, sealed=sealed, can_wait=can_wait)
        if departure.transfer.is_over:
            self._finish_leaving(departure)
            return None
        self._leaving[session.id] = departure
        return departure.transfer

    def _drop_device_pages(self, session: Session) -> None:
        """Frees the device pages of a session that has left with its stage. They were brought from a lower tier, which
        still has them."""
        self._arrivals.call_off(session)
        self.kv.drop(session.id)
        session.computed, session.woken = 0, True

    def _keys_on_device(self, session: Session, staged: list[Key]) -> list[Key]:
        """The keys of the pages that the session would leave with."""
        if staged:
            return keys_with(session, staged, self.kv)
        return self.lower_tiers.keys(session) if session.computed else []

    def _is_expected_last(self, session: Session, keys: list[Key]) -> bool:
        """True if the host could take this session's pages only by losing pages that have no other copy, and those are
        all expected back earlier. Then it is this session's pages that are recomputed (Belady, "A study of replacement
        algorithms for a virtual-storage computer", IBM Systems Journal 1966)."""
        back_at = wanted_at(session, self.now)
        lost = self.paging.lost_by_saving(keys, session.tenant) if back_at else None
        return lost is not None and lost != [] and self.lower_tiers.are_wanted_by(lost, back_at)

    def leave_soon(self, session: Session) -> None:
        """Marks an idle session to leave by `depart`, unless `stay` is called before."""
        self.to_leave[session.id] = session

    def depart(self) -> bool:
        """Lets the first marked session leave, if the host takes its pages freely. Returns True if more are marked.

        It concerns no session with a row, so it is done while a step runs. Between two steps, the device would wait for
        it: up to three milliseconds with 140 pages.
        """
        if self.to_leave:
            session = self.to_leave.pop(next(iter(self.to_leave)))
            if session.request is None and not session.paused and self._leaves_freely(session):
                self.leave(session)
                session.quiet_since = None
        return bool(self.to_leave)

    def _leaves_freely(self, session: Session) -> bool:
        """True if the host can take the session's pages without losing pages that have no other copy."""
        keys = self._keys_on_device(session, staged_keys(session, self.kv))
        return not keys or self.paging.saves_without_loss(keys, session.tenant)

    def loses_by_leaving(self, session: Session) -> bool:
        """True if leaving would lose the session's stage or some of its KV."""
        return session.stage is not None or not self._leaves_freely(session)

    def expect(self, session: Session, back_at: float) -> None:
        """Sets the time at which a session is expected back; it may have left already. 0: it is expected no more."""
        self.lower_tiers.left.expect(session.id, back_at)

    def hurry(self, session: Session) -> None:
        """Raises the priority of the session's transfer, because a request waits for it or is about to come."""
        self._arrivals.hurry(session)

    def stay(self, session: Session) -> None:
        """Keeps the session on the device: it is needed there after all."""
        self.to_leave.pop(session.id, None)
        self._stop_leaving(session)

    def _stop_leaving(self, session: Session) -> None:
        departure = self._leaving.pop(session.id, None)
        if departure is not None:
            self._promised = 0
            self.paging.mark_unneeded(departure.staged)

    def _finish_leaving(self, departure: _Departure) -> None:
        session = departure.session
        if self._leaving.pop(session.id, None) is not None:
            self._promised = 0
        if session.foreign_tokens and departure.transfer.failed and not departure.forced:
            return
        self.lower_tiers.forget(session)
        if departure.staged and session.stage is not None and not departure.transfer.failed:
            session.left_stage = self.lower_tiers.remember_staged(session, departure.staged)
        else:
            self.paging.mark_unneeded(departure.staged)
            if session.computed and session.computed == departure.reach:
                self.lower_tiers.remember(session)
        if departure.reach:
            session.left_at = departure.reach
        session.woken = session.woken or departure.reach > 0 or bool(departure.staged)
        self.kv.drop(session.id)
        session.stage, session.computed = None, 0

    def over(self, transfer: Transfer) -> None:
        """Applies a transfer that has ended, unless the session no longer waits for it."""
        departure = self._leaving.get(transfer.session)
        if departure is not None and departure.transfer is transfer:
            self._finish_leaving(departure)
        self._arrivals.over(transfer)

    # --- along with the session -------------------------------------------------------------------------------------

    def rewind(self, session: Session, computed: int) -> None:
        """Makes the session go on after its first `computed` tokens. If other sessions hold the page that it would
        write into, it goes on earlier, at the start of that page.

        Its transfers are dropped and its stage is lost. A session that has left can still find its pages, as far as its
        tokens go.
        """
        left = None if self.kv.pages_held(session.id) else self.lower_tiers.left.get(session.id)
        self.forget(session)
        self._trim(session, computed)
        if left is not None:
            self.lower_tiers.revise(session, left, len(session.tokens))

    def _trim(self, session: Session, computed: int) -> None:
        session.stage = None
        session.computed = self.kv.trim(session.id, computed)

    def keep_to_state(self, session: Session) -> bool:
        """Before the session runs: if its KV reaches further than a state from which it can go on, it goes on earlier.
        This is so after a step that failed or was not counted. It also does if its last page is being copied, because
        the step would change the state that the copy reads. Returns False if that has to be asked again, because the
        session is in the middle of its blocks or of a move."""
        if session.stage is not None or self.is_moving(session):
            return False
        kv, computed = self.kv, session.computed
        if not kv.has_state(session.id, computed) or kv.is_end_read(session.id, computed):
            self.rewind(session, computed)
        return True

    def advance(self, session: Session, computed: int) -> None:
        """Notes that the session now has KV of its first `computed` tokens."""
        filled = computed // self.kv.page_size > session.computed // self.kv.page_size
        session.computed = computed
        if filled:
            self.kv.publish(session.id, session.tenant, session.names, computed, session.page_salt)

    def revise(self, session: Session, first: int) -> None:
        """Takes back the session's KV from position `first` on, because it will follow from other tokens or edits. KV
        of earlier positions stays. If the session has a stage, nothing may have changed in the blocks that its
        positions have passed."""
        if session.left_stage is not None:
            self._stop_leaving(session)
            self._arrivals.call_off(session)
            self._trim(session, min(session.computed, first))
            return
        left = self.lower_tiers.left.get(session.id)
        if session.stage is None:
            self.rewind(session, min(session.computed, first))
        if left is not None:
            self.lower_tiers.revise(session, left, first)

    def close(self, session: Session) -> None:
        """Forgets a session that is closed. Lower tiers keep its pages for sessions that begin with the same tokens,
        but can spare those that no other session has left there."""
        left = self.lower_tiers.left.get(session.id)
        keys = [] if left is None else list(left.keys)
        if session.computed:
            keys += self.lower_tiers.keys(session)
        self.stay(session)
        self.forget(session)
        self.kv.drop(session.id)
        leaving = set(
            chain.from_iterable(self._keys_on_device(one.session, one.staged) for one in self._leaving.values())
        )
        self.paging.mark_unneeded([key for key in keys if key not in self.lower_tiers.left and key not in leaving])

    def forget(self, session: Session) -> None:
        """Drops the session's transfers and forgets the pages that it has left."""
        self._stop_leaving(session)
        self._arrivals.call_off(session)
        self.lower_tiers.forget(session)

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.paging.check_integrity()
        self.lower_tiers.check_integrity()
        self._arrivals.check_integrity()
        assert not self._leaving.keys() & self._arriving.keys(), "a session leaves and arrives"
        for departure in self._leaving.values():
            assert not departure.transfer.is_over, f"session {departure.session.id} has left"
        if self._promised and self._promised_at == self.kv.changes:
            gone = [departure.session for departure in self._leaving.values() if departure.forced]
            given = Counter(chain.from_iterable(self.kv.pages_of(session.id) for session in gone))
            freed = sum(given[page] == self.kv.holders(page) for page in given)
            assert freed >= self._promised, f"{self._promised} pages are promised, the evicted sessions free {freed}"
