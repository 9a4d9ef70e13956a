"""The run queue: a model's active sessions, and the order in which they are served.

    the aged one ─► interactive ─► agent ─► batch         by class, strictly
                    └─ tenants: the clock that is furthest behind, row by row
                       └─ sessions: the deadline with the earliest latest start; sessions that hold pages;
                          sessions with little to read; order of arrival

While pages are short, sessions that hold pages go before others of their class. So sessions finish their requests one
after another, instead of taking each other's pages in every step. Between two tenants, this holds until one is a seat
(FairnessTuning) ahead of the other. For the same reason, a session with a deadline keeps its place among those with
deadlines, however much it has generated since.

While pages are not short, sessions with much to read come last (shortest job first). Otherwise an agent that is back
from a tool with 64 tokens would wait until thousands of tokens of earlier sessions have been read, in chunks, beside
sessions that decode. The long ones lose next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from itertools import chain

import numpy as np

from djinn_client.protocol import CLASSES, Class
from djinnd.core.session import Session
from djinnd.scheduler.tuning import FAIRNESS
from djinnd.scheduler.turns.shares import Shares


class RunQueue:
    """The active sessions of one model, by class and tenant."""

    def __init__(self) -> None:
        self._classes: dict[Class, dict[int, dict[str, Session]]] = {priority: {} for priority in CLASSES}
        self._places: dict[str, tuple[Class, int]] = {}  # class and tenant of each session in the queue
        self._latest_start: dict[str, float] = {}  # of the sessions with a deadline

    def join(self, session: Session, latest_start: float = math.inf) -> None:
        """`latest_start`: when a session with a deadline has to be begun to be ready in time."""
        self._places[session.id] = session.priority, session.tenant
        self._classes[session.priority].setdefault(session.tenant, {})[session.id] = session
        if latest_start < math.inf:
            self._latest_start[session.id] = latest_start

    def leave(self, session: Session) -> None:
        """Removes the session from the queue. No effect if it is not in the queue."""
        place = self._places.pop(session.id, None)
        if place is None:
            return
        self._latest_start.pop(session.id, None)
        priority, tenant = place
        own = self._classes[priority][tenant]
        del own[session.id]
        if not own:
            del self._classes[priority][tenant]

    def __contains__(self, session: Session) -> bool:
        return session.id in self._places

    def tenants(self, priority: Class, but: Callable[[Session], bool] | None = None) -> Collection[int]:
        """Tenants with a session of the class in the queue. A tenant does not count if `but` is true of all of its
        sessions."""
        tenants = self._classes[priority]
        if but is None:
            return tenants.keys()
        return [tenant for tenant, own in tenants.items() if not all(map(but, own.values()))]

    def of(self, priority: Class) -> Iterator[Session]:
        return chain.from_iterable([own.values() for own in self._classes[priority].values()])

    def highest_of(self, tenant: int) -> tuple[int, Iterable[Session]] | None:
        """The rank of the tenant's highest class with a session in the queue, and its sessions of that class."""
        for rank, priority in enumerate(CLASSES):
            if own := self._classes[priority].get(tenant):
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
        """The sessions class by class, after the aged one. Costs O(n log n).

        `row_s`: device seconds that a row is likely to take. `seated`: sessions that hold pages, if pages are short;
        else empty. `lengthy`: sessions with much to read before their next token; ignored if pages are short.
        """
        order = []
        for priority, tenants in self._classes.items():
            lines = {tenant: self._own(own, seated, lengthy) for tenant, own in tenants.items()}
            order.append(self._fairly(lines, priority, shares, row_s, seated))
        if aged is None:
            return order
        return [[aged], *([session for session in sessions if session is not aged] for sessions in order)]

    def _own(self, own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Collection[Session]:
        """The sessions of one tenant and class in order."""
        latest_start = self._latest_start
        if latest_start and not latest_start.keys().isdisjoint(own):
            urgent = [name for name in own if name in latest_start]
            urgent.sort(key=latest_start.__getitem__)
            rest = {name: session for name, session in own.items() if name not in latest_start}
            return [*map(own.__getitem__, urgent), *_in_turn(rest, seated, lengthy)]
        return _in_turn(own, seated, lengthy)

    def _fairly(
        self, lines: dict[int, Collection[Session]], priority: Class, shares: Shares, row_s: float, seated: Set[str]
    ) -> list[Session]:
        """The sessions of one class in order: the tenants' `lines` are merged as their clocks would run."""
        if len(lines) <= 1:
            return list(chain.from_iterable(lines.values()))
        tenants = sorted(lines)
        weights = np.array([shares.weight(tenant) for tenant in tenants])
        clocks = np.array([shares.clock(priority, tenant) for tenant in tenants])
        lengths = np.array([len(lines[tenant]) for tenant in tenants])
        order = list(chain.from_iterable([lines[tenant] for tenant in tenants]))
        ends = lengths.cumsum()
        before = np.arange(len(order)) - (ends - lengths).repeat(lengths)  # how many are before each in its line
        places = clocks.repeat(lengths) + before * (row_s / weights).repeat(lengths)  # rising in each line
        if seated:
            is_seated = np.fromiter([session.id in seated for session in order], bool, len(order))
            places -= is_seated * (FAIRNESS.seat_s / weights).repeat(lengths)
            if self._latest_start:  # a session behind an unseated one with a deadline comes right after that one
                for line in np.split(places, ends[:-1]):
                    np.maximum.accumulate(line, out=line)
        return list(map(order.__getitem__, places.argsort(kind="stable").tolist()))  # ties go by tenant

    def check_integrity(self, active: dict[str, Session]) -> None:
        standing = {
            session.id: (priority, tenant)
            for priority, tenants in self._classes.items()
            for tenant, own in tenants.items()
            for session in own.values()
        }
        assert standing == self._places, "the queue and its places differ"
        wanted = {session.id: (session.priority, session.tenant) for session in active.values()}
        assert standing == wanted, f"in the queue {sorted(standing)}, active {sorted(wanted)}"
        assert self._latest_start.keys() <= standing.keys()


def _in_turn(own: dict[str, Session], seated: Set[str], lengthy: Set[str]) -> Collection[Session]:
    """The order of arrival, but with seated sessions first, or lengthy ones last."""
    if not (seated or lengthy):
        return own.values()
    names = seated or lengthy
    some = [session for name, session in own.items() if name in names]
    others = [session for name, session in own.items() if name not in names]
    return some + others if seated else others + some
