"""Sessions that come back to the device: from when lower tiers are asked for what they have, until it is there.

    elsewhere ──bring──► arriving ──the transfer is over──► arrived, or what has not come is computed anew
                             └────────call_off────────► elsewhere

One that arrives holds its pages already, and has no row until all have come.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.prefixes import Key
from djinnd.scheduler.elsewhere import Elsewhere
from djinnd.scheduler.useful_kv import of_use


@dataclass(frozen=True, slots=True)
class Arrival:
    session: Session
    transfer: Transfer
    keys: tuple[Key, ...]
    staged: LeftStage | None  # what comes with them


class Arrivals:
    """Of one model's sessions; of none that is leaving."""

    def __init__(self, paging: Paging, elsewhere: Elsewhere) -> None:
        self._kv = paging.kv
        self._paging = paging
        self._elsewhere = elsewhere
        self.under_way: dict[str, Arrival] = {}  # by session; not to be changed by others

    def bring(self, session: Session) -> bool:
        """Whether lower tiers have what it lacks, so that it has to wait. Raises OutOfPages: when there is room, it
        is to be asked again, as making it may have taken what was found. (What could only come through a host that is
        not ready is computed anew, if it can be.)"""
        found = self._elsewhere.found(session)
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
            if transfer.is_over:  # all that it could come through is busy, or not ready yet
                return not self._paging.has_room_later(session.tenant)
            staged = session.left_stage if found.is_staged else None
            self.under_way[session.id] = Arrival(session, transfer, found.keys[: transfer.missing], staged)
        return True

    def hurry(self, session: Session) -> None:
        """A call waits for what arrives, or will in a moment."""
        arrival = self.under_way.get(session.id)
        if arrival is not None:
            self._paging.moves.hurry(arrival.transfer)

    def call_off(self, session: Session) -> None:
        """It is not waited for any more."""
        arrival = self.under_way.pop(session.id, None)
        if arrival is not None:
            self._paging.moves.drop(arrival.transfer)

    def reach(self, session: Session) -> int:
        """Tokens whose KV is somewhere, be it on its way."""
        arrival = self.under_way.get(session.id)
        if arrival is None:
            return session.computed
        return arrival.transfer.tokens if arrival.staged is None else arrival.staged.computed

    def over(self, transfer: Transfer) -> None:
        """It has ended. Whoever it was made for may have gone another way meanwhile."""
        arrival = self.under_way.get(transfer.session)
        if arrival is not None and arrival.transfer is transfer:
            del self.under_way[transfer.session]
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        session, transfer = arrival.session, arrival.transfer
        if transfer.failed:
            self._go_back_to(session, session.computed)
            return
        self._paging.is_back(arrival.keys)
        staged = arrival.staged
        if staged is not None:
            self._arrived_staged(arrival, staged)
            return
        self._elsewhere.lose_stage(session)
        self._kv.arrived(session.id, arrival.keys, transfer.tokens)
        session.computed = transfer.tokens
        most = of_use(session)
        if session.computed > most:
            self._go_back_to(session, most)
            session.foreign_tokens = min(session.foreign_tokens, most)

    def _arrived_staged(self, arrival: Arrival, staged: LeftStage) -> None:
        """All of its pages are back, and so is what waits inside the model, if that is still wanted; else it has the
        pages that are full of KV."""
        session, tokens, size = arrival.session, arrival.transfer.tokens, self._kv.page_size
        full = min(tokens, staged.computed) // size * size
        self._kv.arrived(session.id, arrival.keys, full)
        if tokens == staged.length and session.left_stage is staged:
            session.computed, session.stage = staged.computed, staged.stage
            self._elsewhere.lose_stage(session)
        else:
            session.computed, most = full, min(full, of_use(session))
            self._go_back_to(session, most)
            session.foreign_tokens = min(session.foreign_tokens, most)

    def _go_back_to(self, session: Session, computed: int) -> None:
        """As Residence.rewind, of one that does not move any more."""
        self._elsewhere.forget(session)
        session.stage = None
        session.computed = self._kv.trim(session.id, computed)

    def check_integrity(self) -> None:
        for arrival in self.under_way.values():
            held, wanted = self._kv.pages_held(arrival.session.id), self._kv.pages_for(arrival.transfer.tokens)
            assert held == wanted, f"{arrival.session.id} arrives with {held} pages of {wanted}"
