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

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from itertools import chain

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
    ) -> Iterator[Session]:
        """Lazily. `row_s`: device seconds that a row is likely to take. `seated`: who holds pages, where those are
        short; else nobody. `lengthy`: who has much to read before its next token; of no account where pages are
        short."""
        if aged is not None:
            yield aged
        for klass, tenants in self._classes.items():
            lines = {tenant: self._own(own, seated, lengthy) for tenant, own in tenants.items()}
            for session in _fairly(lines, klass, shares, row_s, seated):
                if session is not aged:
                    yield session

    def _own(self, own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Iterator[Session]:
        """One tenant's, of one class."""
        latest_start = self._latest_start
        if latest_start and not latest_start.keys().isdisjoint(own):
            urgent = [name for name in own if name in latest_start]
            urgent.sort(key=latest_start.__getitem__)
            rest = {name: session for name, session in own.items() if name not in latest_start}
            return chain(map(own.__getitem__, urgent), _in_turn(rest, seated, lengthy))
        return _in_turn(own, seated, lengthy)

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


def _in_turn(own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Iterator[Session]:
    if seated:
        return _parted(own, seated)
    return _parted(own, lengthy, last=True) if lengthy else iter(own.values())


def _parted(own: dict[str, Session], names: Set[str], *, last: bool = False) -> Iterator[Session]:
    """Lazily: those of these names first, or last, and else as they came."""
    some = (session for name, session in own.items() if name in names)
    others = (session for name, session in own.items() if name not in names)
    return chain(others, some) if last else chain(some, others)


def _fairly(
    lines: dict[int, Iterator[Session]], klass: Class, shares: Shares, row_s: float, seated: Set[str]
) -> Iterator[Session]:
    """One class's sessions: each of its tenants' `lines` in turn, as their clocks would run."""
    if len(lines) <= 1:
        return chain.from_iterable(lines.values())
    return _merged(lines, klass, shares, row_s, seated)


def _merged(
    lines: dict[int, Iterator[Session]], klass: Class, shares: Shares, row_s: float, seated: Set[str]
) -> Iterator[Session]:
    """Runs for each session that is asked for, in every step."""
    turns: list[tuple[float, int, float, Session]] = []  # a heap of place, tenant, clock, the tenant's next session
    weights = {tenant: shares.weight(tenant) for tenant in lines}
    for tenant, line in lines.items():
        first = next(line, None)
        if first is not None:
            clock = shares.clock(klass, tenant)
            turns.append((clock - (SEAT / weights[tenant] if first.id in seated else 0.0), tenant, clock, first))
    heapq.heapify(turns)
    while turns:
        _, tenant, clock, session = turns[0]
        yield session
        following = next(lines[tenant], None)
        if following is None:
            heapq.heappop(turns)
            continue
        clock += row_s / weights[tenant]
        place = clock - SEAT / weights[tenant] if following.id in seated else clock
        heapq.heapreplace(turns, (place, tenant, clock, following))
