"""Sessions that come back to the device, from the request to lower tiers until their pages are there.

    elsewhere ──bring──► arriving ──transfer ends──► arrived; pages that did not come are recomputed
                             └────────call_off────────► elsewhere

An arriving session already holds its device pages, and has no row until all of them are filled.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.prefixes import Key
from djinnd.scheduler.residency.lower_tiers import LowerTiers
from djinnd.scheduler.residency.reusable_kv import usable_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    session: Session
    transfer: Transfer
    keys: tuple[Key, ...]
    staged: LeftStage | None  # the stage that comes with them


class Arrivals:
    """The arriving sessions of one model. A session that is leaving is not among them."""

    def __init__(self, paging: Paging, lower_tiers: LowerTiers) -> None:
        self._kv = paging.kv
        self._paging = paging
        self._lower_tiers = lower_tiers
        self.under_way: dict[str, Arrival] = {}  # by session id; only this class changes it

    def bring(self, session: Session) -> bool:
        """Begins to copy what lower tiers have of the session's KV. Returns True if the session has to wait, and False
        if there is nothing to copy.

        Raises OutOfPages. When there is room, call it again: making room may have evicted the pages that were found.
        Pages that could come only through a host that is not ready are recomputed, if they can be.
        """
        found = self._lower_tiers.found(session)
        if found is None:
            return False
        if not found.on_the_way:
            must = session.computed < session.foreign_tokens
            kept = self._kv.trim(session.id, found.start)
            assert kept == found.start, (kept, found)
            session.computed = found.start
            transfer = self._paging.load(session.id, session.tenant, found, can_wait=must)
            if session.request is not None or session.called:
                self._paging.moves.hurry(transfer)
            if transfer.is_over:  # every slot that the pages could come through is busy or not ready
                return not self._paging.has_room_later(session.tenant)
            staged = session.left_stage if found.is_staged else None
            self.under_way[session.id] = Arrival(session, transfer, found.keys[: transfer.missing], staged)
        return True

    def hurry(self, session: Session) -> None:
        """Raises the priority of the session's transfer, because a request waits for it or is about to come."""
        arrival = self.under_way.get(session.id)
        if arrival is not None:
            self._paging.moves.hurry(arrival.transfer)

    def call_off(self, session: Session) -> None:
        """Drops the session's transfer."""
        arrival = self.under_way.pop(session.id, None)
        if arrival is not None:
            self._paging.moves.drop(arrival.transfer)

    def reach(self, session: Session) -> int:
        """How many tokens have KV on the device or on its way there."""
        arrival = self.under_way.get(session.id)
        if arrival is None:
            return session.computed
        return arrival.transfer.tokens if arrival.staged is None else arrival.staged.computed

    def over(self, transfer: Transfer) -> None:
        """Applies a transfer that has ended, unless the session no longer waits for it."""
        arrival = self.under_way.get(transfer.session)
        if arrival is not None and arrival.transfer is transfer:
            del self.under_way[transfer.session]
            self._finish(arrival)

    def _finish(self, arrival: Arrival) -> None:
        session, transfer = arrival.session, arrival.transfer
        if transfer.failed:
            self._rewind(session, session.computed)
            return
        self._paging.mark_returned(arrival.keys)
        staged = arrival.staged
        if staged is not None:
            self._finish_staged(arrival, staged)
            return
        self._lower_tiers.lose_stage(session)
        self._kv.arrived(session.id, arrival.keys, transfer.tokens)
        session.computed = transfer.tokens
        most = usable_tokens(session)
        if session.computed > most:
            self._rewind(session, most)
            session.foreign_tokens = min(session.foreign_tokens, most)

    def _finish_staged(self, arrival: Arrival, staged: LeftStage) -> None:
        """Gives the session its pages and its stage, if the stage is still needed; otherwise only the pages that are
        full of KV."""
        session, tokens, size = arrival.session, arrival.transfer.tokens, self._kv.page_size
        full = min(tokens, staged.computed) // size * size
        self._kv.arrived(session.id, arrival.keys, full)
        if tokens == staged.length and session.left_stage is staged:
            session.computed, session.stage = staged.computed, staged.stage
            self._lower_tiers.lose_stage(session)
        else:
            session.computed, most = full, min(full, usable_tokens(session))
            self._rewind(session, most)
            session.foreign_tokens = min(session.foreign_tokens, most)

    def _rewind(self, session: Session, computed: int) -> None:
        """Makes a session go on after its first `computed` tokens. None of its pages may be moving."""
        self._lower_tiers.forget(session)
        session.stage = None
        session.computed = self._kv.trim(session.id, computed)

    def check_integrity(self) -> None:
        for arrival in self.under_way.values():
            held, wanted = self._kv.pages_held(arrival.session.id), self._kv.pages_for(arrival.transfer.tokens)
            assert held == wanted, f"{arrival.session.id} arrives with {held} pages of {wanted}"
