"""How long sessions wait for tools, learned from how long they have waited.

Of each tenant's tool the mean of the waits that were seen and their mean deviation from it, both exponential: as TCP
estimates round trips (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988), but that the first few waits count
alike. Whoever began to wait before anything was known is expected, too, once it is. Pure: times come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_TOOLS = 4096  # that are remembered; the least recently used go
MOST_WAITS = 1 << 16  # that have not ended; the first of them go: a session that closes ends none
KNOWN_AFTER = 3  # waits
LEAD = 1.5  # times what copying takes, so much before it is expected, a session comes back; and a little more:
LEAD_S = 0.05
WORTH = 4  # times what copying takes: a shorter wait is not worth leaving for
_GAIN = 1 / 8  # of the last wait, once that many have been seen

Key = tuple[int, str]  # tenant and tool


def is_worth_leaving(expected: float | None, copying: float) -> bool:
    """Seconds that a session whose pages are on the device waits (None: nobody knows), and that copying them takes."""
    return expected is None or expected >= WORTH * copying


def back_at(now: float, expected: float | None, copying: float) -> float:
    """When its pages are to come back, to be there in time; 0: when they are asked for."""
    return 0.0 if expected is None else now + max(expected - LEAD * copying - LEAD_S, 0.0)


class Expected(NamedTuple):
    """Who has begun to wait `since` then, for what may well take so many `seconds`."""

    session: str
    since: float
    seconds: float


class _Wait(NamedTuple):
    key: Key
    since: float


@dataclass(slots=True)
class _Tool:
    seen: int = 0
    mean: float = 0.0  # seconds
    deviation: float = 0.0  # mean of absolute differences from the mean

    def observe(self, seconds: float) -> None:
        self.seen += 1
        error = seconds - self.mean
        self.mean += error * max(_GAIN, 1 / self.seen)
        if self.seen > 1:
            self.deviation += (abs(error) - self.deviation) * max(_GAIN, 1 / (self.seen - 1))

    @property
    def expected(self) -> float | None:
        if self.seen < KNOWN_AFTER or self.deviation > self.mean:
            return None
        return self.mean - self.deviation


class Waits:
    """What belongs to no tool has the name ""."""

    def __init__(self) -> None:
        self._tools: dict[Key, _Tool] = {}  # the most recently used is the last
        self._open: dict[str, _Wait] = {}  # by session; the last that began is the last
        self._alike: dict[Key, dict[str, None]] = {}  # the sessions of these, by what they wait for

    def begin(self, session: str, tenant: int, tool: str, now: float) -> None:
        """The session waits from now on, and for nothing else any more."""
        self._close(session)
        if len(self._open) == MOST_WAITS:
            self._close(next(iter(self._open)))
        wait = self._open[session] = _Wait((tenant, tool), now)
        self._alike.setdefault(wait.key, {})[session] = None

    def end(self, session: str, now: float) -> list[Expected]:
        """The session goes on. → whoever else waits for the same, where nobody knew before how long that takes. Where
        it does not wait, nothing happens."""
        wait = self._close(session)
        if wait is None:
            return []
        tool = self._tools.pop(wait.key, None) or _Tool()
        if len(self._tools) == MOST_TOOLS:
            del self._tools[next(iter(self._tools))]
        self._tools[wait.key] = tool
        tool.observe(now - wait.since)
        if tool.seen != KNOWN_AFTER or tool.expected is None:
            return []
        return [Expected(other, self._open[other].since, tool.expected) for other in self._alike.get(wait.key, ())]

    def _close(self, session: str) -> _Wait | None:
        wait = self._open.pop(session, None)
        if wait is not None:
            alike = self._alike[wait.key]
            del alike[session]
            if not alike:
                del self._alike[wait.key]
        return wait

    def expected(self, tenant: int, tool: str) -> float | None:
        """Seconds after which the tenant's next wait for the tool may well be over: the mean, less the deviation. None
        where too few waits have been seen, or they differ so much that this says nothing."""
        known = self._tools.pop((tenant, tool), None)
        if known is None:
            return None
        self._tools[tenant, tool] = known
        return known.expected
