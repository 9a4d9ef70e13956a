"""Charges the objects of the arena to users' ledgers.

An object is charged before it is created, and again whenever its size changes. Objects of models that an administrator
has configured or loaded are not charged.
"""

from __future__ import annotations

from typing import NamedTuple

from djinnd.messages import Holding
from djinnd.server.arenas.arena import Arena, Key
from djinnd.server.quotas.ledger import ARENA_BYTES, Ledger

HOLDINGS: tuple[Holding, ...] = ("weights", "pages")


class Charge(NamedTuple):
    """The bytes of an object, and the ledger that they are charged to."""

    ledger: Ledger
    nbytes: int


class ArenaCharges:
    """The charges of all objects. Used on the event loop only."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._charges: dict[Key, Charge] = {}

    def reserve(self, key: Key, ledger: Ledger | None, nbytes: int) -> None:
        """Charges the ledger for an object that is about to have `nbytes`, instead of the ledger that paid before.
        `settle` must follow. Raises QuotaExceeded; then nothing has changed."""
        before = self._charges.get(key)
        had = before.nbytes if before is not None and before.ledger is ledger else 0
        if ledger is not None and nbytes > had:
            ledger.charge(ARENA_BYTES, nbytes - had)
        if before is not None and before.ledger is not ledger:
            before.ledger.release(ARENA_BYTES, before.nbytes)
            del self._charges[key]
        if ledger is not None:
            self._charges[key] = Charge(ledger, max(nbytes, had))

    def adopt(self, model: str, ledger: Ledger) -> None:
        """Charges the existing objects of an adopted model, even beyond the limit."""
        for holds in HOLDINGS:
            self._charges[model, holds] = Charge(ledger, 0)
        self.settle(model)

    def settle(self, model: str) -> None:
        """Updates the charges after the model's objects have changed."""
        for holds in HOLDINGS:
            charge = self._charges.pop((model, holds), None)
            if charge is None:
                continue
            nbytes = self._arena.nbytes_of(model, holds)
            charge.ledger.release(ARENA_BYTES, charge.nbytes)
            charge.ledger.add(ARENA_BYTES, nbytes)
            if nbytes:
                self._charges[model, holds] = Charge(charge.ledger, nbytes)
