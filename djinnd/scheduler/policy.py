"""The rules of scheduling, as pure functions and values: latency targets, the order of eviction, and when an idle
session leaves the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row
from djinnd.core.session import Session
from djinnd.scheduler.tuning import EVICTION


class Target(NamedTuple):
    """Latency targets in seconds; inf: none."""

    between_tokens: float = math.inf
    first_token: float = math.inf  # also the next token of a session that has sent a prompt


TARGETS: Mapping[Class, Target] = {"interactive": Target(0.04, 0.4), "agent": Target(0.08, 0.4), "batch": Target()}


@dataclass(frozen=True, slots=True)
class Policy:
    """The configuration's `scheduling` section.

    `ageing`: seconds, see ageing.py. `paging`: the share of the bus in each direction for pages without a waiting
    request, beside steps with protected rows (`protects`).
    """

    targets: Mapping[Class, Target] = field(default_factory=lambda: TARGETS)
    ageing: float = 10.0
    paging: float = 0.25

    def of_class(self, priority: Class) -> Target:
        """A class without a target here has none."""
        return self.targets.get(priority, Target())

    def target(self, session: Session) -> Target:
        """The targets of the session's request. A target that the request does not set is that of its class."""
        target, request = self.of_class(session.priority), session.request
        if request is None or not request.has_target:
            return target
        between, first = request.between_tokens, request.first_token
        return Target(
            target.between_tokens if between is None else between, target.first_token if first is None else first
        )

    def protects(self, row: Row) -> bool:
        """True if the row decodes and its session has a target between tokens."""
        return row.decodes and self.target(row.session).between_tokens < math.inf


DEFAULT = Policy()


def has_gone_quiet(seconds: float, free: float, *, called: bool = False) -> bool:
    """True if an idle session should leave the device after `seconds` without a word from its client.

    `free` is the free share of the pool. `called`: the session has just been brought back for its next request. Pages
    that have left can be found on the device until they are given to another session, so that coming back costs little.
    """
    return seconds >= (EVICTION.crowded_quiet_s if free < EVICTION.scarce and not called else EVICTION.quiet_s)


def eviction_order(idle: Iterable[Session], held: Iterable[Session], order: list[Session]) -> Iterator[Session]:
    """Yields sessions in the order in which they are evicted.

    First come the idle ones: waiting sessions first and called sessions last, KV that a client imported last of all,
    then the lowest class, then the session that is expected back last, then the least recently used. Then come the held
    ones (paused, or with a slow client), the least recently used first. Then come the active ones, in reverse serving
    `order`.
    """
    yield from sorted(idle, key=_worth)
    yield from sorted(held, key=_touched)
    yield from reversed(order)


def _worth(session: Session) -> tuple[bool, bool, bool, int, float, int]:
    """Sort key of an idle session: the lowest is evicted first. KV that a client imported goes last, because it cannot
    be recomputed."""
    rank = -CLASSES.index(session.priority)  # the lowest class is the last of them
    given = bool(session.foreign_tokens)
    return given, not session.waits, session.called, rank, -session.wakes_at, session.touched


def _touched(session: Session) -> int:
    return session.touched
