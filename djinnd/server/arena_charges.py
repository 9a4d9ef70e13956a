"""Which user's ledger each object of the arena is charged to.

The charge is made before the object is created and follows the object's size after every change of it. Objects of
models that an administrator has configured or brought are in nobody's ledger, and not here.
"""

from __future__ import annotations

from typing import NamedTuple

from djinnd.messages import Holding
from djinnd.server.arena import Arena, Key
from djinnd.server.ledger import ARENA_BYTES, Ledger

HOLDINGS: tuple[Holding, ...] = ("weights", "pages")


class Charge(NamedTuple):
    ledger: Ledger
    nbytes: int


class ArenaCharges:
    """Belongs to the event loop."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._charges: dict[Key, Charge] = {}

    def reserve(self, key: Key, ledger: Ledger | None, nbytes: int) -> None:
        """The object is going to have so many bytes, which this ledger pays for, and no other one any more. `settle`
        follows. Raises QuotaExceeded, and changes nothing then."""
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
        """The objects of a model that an earlier daemon has left: they are there, whatever the limit says."""
        for holds in HOLDINGS:
            self._charges[model, holds] = Charge(ledger, 0)
        self.settle(model)

    def settle(self, model: str) -> None:
        """The model's objects have changed."""
        for holds in HOLDINGS:
            charge = self._charges.pop((model, holds), None)
            if charge is None:
                continue
            nbytes = self._arena.nbytes_of(model, holds)
            charge.ledger.release(ARENA_BYTES, charge.nbytes)
            charge.ledger.add(ARENA_BYTES, nbytes)
            if nbytes:
                self._charges[model, holds] = Charge(charge.ledger, nbytes)
