"""How long sessions wait for tools, learned from how long they have waited.

Of each tenant's tool the mean of the waits that were seen and their mean deviation from it, both exponential: as TCP
estimates round trips (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988), but that the first few waits count
alike. Pure: times come from the caller.
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


class Waits:
    """What belongs to no tool has the name ""."""

    def __init__(self) -> None:
        self._tools: dict[Key, _Tool] = {}  # the most recently used is the last
        self._open: dict[str, _Wait] = {}  # by session; the last that began is the last

    def begin(self, session: str, tenant: int, tool: str, now: float) -> None:
        """The session waits from now on, and for nothing else any more."""
        self._open.pop(session, None)
        if len(self._open) == MOST_WAITS:
            del self._open[next(iter(self._open))]
        self._open[session] = _Wait((tenant, tool), now)

    def end(self, session: str, now: float) -> None:
        """The session goes on. Does nothing where it does not wait."""
        wait = self._open.pop(session, None)
        if wait is None:
            return
        tool = self._tools.pop(wait.key, None) or _Tool()
        if len(self._tools) == MOST_TOOLS:
            del self._tools[next(iter(self._tools))]
        self._tools[wait.key] = tool
        tool.observe(now - wait.since)

    def expected(self, tenant: int, tool: str) -> float | None:
        """Seconds after which the tenant's next wait for the tool may well be over: the mean, less the deviation. None
        where too few waits have been seen, or they differ so much that this says nothing."""
        known = self._tools.pop((tenant, tool), None)
        if known is None:
            return None
        self._tools[tenant, tool] = known
        if known.seen < KNOWN_AFTER or known.deviation > known.mean:
            return None
        return known.mean - known.deviation
