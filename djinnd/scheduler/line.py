"""The line of a model's active sessions, and the order in which it is served.

    the aged one ─► interactive ─► agent ─► batch         by class, strictly
                    └─ tenants: whose clock is behind, row by row
                       └─ sessions: the deadline that must be begun first; who holds pages; who has not much to read;
                          as they came

Where pages are short, who holds some goes on before anybody of the same class is given any: sessions come to the end of
their calls one after another, instead of taking their pages from each other in every step. Between two tenants that
holds until the one is SEAT ahead. For the same reason a session with a deadline keeps the place among those that it
came with, whatever it has generated since.

Where they are not, who has much to read comes last (the shortest job first, where that matters most): an agent back
from a tool with 64 tokens would else wait until the thousands of those before it have been read, in chunks, beside
those that decode. That costs these next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from itertools import chain

import numpy as np

from djinn_client.protocol import CLASSES, Class
from djinnd.core.session import Session
from djinnd.scheduler.shares import Shares

SEAT = 0.25  # seconds of device time at weight 1


class Line:
    """Of one model."""

    def __init__(self) -> None:
        self._classes: dict[Class, dict[int, dict[str, Session]]] = {klass: {} for klass in CLASSES}
        self._places: dict[str, tuple[Class, int]] = {}  # where each session stands
        self._latest_start: dict[str, float] = {}  # of those with a deadline

    def join(self, session: Session, latest_start: float = math.inf) -> None:
        """`latest_start`: when one with a deadline has to be begun, to be ready in time."""
        self._places[session.id] = session.klass, session.tenant
        self._classes[session.klass].setdefault(session.tenant, {})[session.id] = session
        if latest_start < math.inf:
            self._latest_start[session.id] = latest_start

    def leave(self, session: Session) -> None:
        """Where it does not stand, nothing happens."""
        place = self._places.pop(session.id, None)
        if place is None:
            return
        self._latest_start.pop(session.id, None)
        klass, tenant = place
        own = self._classes[klass][tenant]
        del own[session.id]
        if not own:
            del self._classes[klass][tenant]

    def __contains__(self, session: Session) -> bool:
        return session.id in self._places

    def tenants(self, klass: Class, but: Callable[[Session], bool] | None = None) -> Collection[int]:
        """Those with a session of that class here, and not only such that `but` is true of."""
        tenants = self._classes[klass]
        if but is None:
            return tenants.keys()
        return [tenant for tenant, own in tenants.items() if not all(map(but, own.values()))]

    def of(self, klass: Class) -> Iterator[Session]:
        return chain.from_iterable([own.values() for own in self._classes[klass].values()])

    def foremost(self) -> Class | None:
        """The highest class that anybody here has."""
        return next((klass for klass in CLASSES if self._classes[klass]), None)

    def foremost_of(self, tenant: int) -> tuple[int, Iterable[Session]] | None:
        """The highest class that it has a session of here, as its place among CLASSES, and all of these."""
        for rank, klass in enumerate(CLASSES):
            if own := self._classes[klass].get(tenant):
                return rank, own.values()
        return None

    def in_order(
        self,
        shares: Shares,
        row_s: float,
        seated: Set[str],
        lengthy: Set[str],
        aged: Session | None = None,
    ) -> list[list[Session]]:
        """Class by class, after the aged one. `row_s`: device seconds that a row is likely to take. `seated`: who holds
        pages, where those are short; else nobody. `lengthy`: who has much to read before its next token; of no account
        where pages are short. O(n log n)"""
        order = []
        for klass, tenants in self._classes.items():
            lines = {tenant: self._own(own, seated, lengthy) for tenant, own in tenants.items()}
            order.append(self._fairly(lines, klass, shares, row_s, seated))
        if aged is None:
            return order
        return [[aged], *([session for session in sessions if session is not aged] for sessions in order)]

    def _own(self, own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Collection[Session]:
        """One tenant's, of one class."""
        latest_start = self._latest_start
        if latest_start and not latest_start.keys().isdisjoint(own):
            urgent = [name for name in own if name in latest_start]
            urgent.sort(key=latest_start.__getitem__)
            rest = {name: session for name, session in own.items() if name not in latest_start}
            return [*map(own.__getitem__, urgent), *_in_turn(rest, seated, lengthy)]
        return _in_turn(own, seated, lengthy)

    def _fairly(
        self, lines: dict[int, Collection[Session]], klass: Class, shares: Shares, row_s: float, seated: Set[str]
    ) -> list[Session]:
        """One class's sessions: each of its tenants' `lines` in turn, as their clocks would run."""
        if len(lines) <= 1:
            return list(chain.from_iterable(lines.values()))
        tenants = sorted(lines)
        weights = np.array([shares.weight(tenant) for tenant in tenants])
        clocks = np.array([shares.clock(klass, tenant) for tenant in tenants])
        lengths = np.array([len(lines[tenant]) for tenant in tenants])
        order = list(chain.from_iterable([lines[tenant] for tenant in tenants]))
        ends = lengths.cumsum()
        before = np.arange(len(order)) - (ends - lengths).repeat(lengths)  # of each, in its line
        places = clocks.repeat(lengths) + before * (row_s / weights).repeat(lengths)  # rising in each line
        if seated:
            is_seated = np.fromiter([session.id in seated for session in order], bool, len(order))
            places -= is_seated * (SEAT / weights).repeat(lengths)
            if self._latest_start:  # who stands behind one with a deadline who is not seated comes right after that one
                for line in np.split(places, ends[:-1]):
                    np.maximum.accumulate(line, out=line)
        return list(map(order.__getitem__, places.argsort(kind="stable").tolist()))  # equal: the tenant decides

    def check_integrity(self, active: dict[str, Session]) -> None:
        standing = {
            session.id: (klass, tenant)
            for klass, tenants in self._classes.items()
            for tenant, own in tenants.items()
            for session in own.values()
        }
        assert standing == self._places, "the line and its places differ"
        wanted = {session.id: (session.klass, session.tenant) for session in active.values()}
        assert standing == wanted, f"in line {sorted(standing)}, active {sorted(wanted)}"
        assert self._latest_start.keys() <= standing.keys()


def _in_turn(own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Collection[Session]:
    """As they came; but first who is seated, or last who has much to read."""
    if not (seated or lengthy):
        return own.values()
    names = seated or lengthy
    some = [session for name, session in own.items() if name in names]
    others = [session for name, session in own.items() if name not in names]
    return some + others if seated else others + some
