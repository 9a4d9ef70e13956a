"""Learns how long sessions wait for tools, from the waits that have been seen.

For each tenant and tool it keeps the mean of the waits and their mean deviation, both exponential, as TCP estimates
round trips (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988); the first few waits count alike. Sessions that
began to wait before a tool was known get an expected time once it is. Pure: times come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_TOOLS = 4096  # tools remembered; the least recently used are forgotten
MOST_WAITS = 1 << 16  # Open waits remembered; the oldest are forgotten. A session that closes does not end its wait.
KNOWN_AFTER = 3  # waits after which a tool's time is known
LEAD = 1.5  # A session comes back before it is expected, by LEAD times the time of the copy plus LEAD_S seconds.
LEAD_S = 0.05
WORTH = 4  # times the time of the copy: a shorter wait is not worth leaving for
_GAIN = 1 / 8  # weight of the last wait, once eight have been seen

Key = tuple[int, str]  # tenant and tool


def is_worth_leaving(expected: float | None, copying: float) -> bool:
    """True if a wait of `expected` seconds (None: unknown) is long enough to move pages whose copy takes `copying`
    seconds."""
    return expected is None or expected >= WORTH * copying


def back_at(now: float, expected: float | None, copying: float) -> float:
    """When to bring the pages back so that they are there in time; 0: only when they are asked for."""
    return 0.0 if expected is None else now + max(expected - LEAD * copying - LEAD_S, 0.0)


class Expected(NamedTuple):
    """A session that has waited `since` a time, and is now expected to wait `seconds` in all."""

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
    """All open waits and known tools. Waits without a tool have the tool ""."""

    def __init__(self) -> None:
        self._tools: dict[Key, _Tool] = {}  # the most recently used is the last
        self._open: dict[str, _Wait] = {}  # by session, in order of their begin
        self._alike: dict[Key, dict[str, None]] = {}  # the sessions with open waits, by tenant and tool

    def begin(self, session: str, tenant: int, tool: str, now: float) -> None:
        """Begins a wait of the session, which ends an earlier one without counting it."""
        self._close(session)
        if len(self._open) == MOST_WAITS:
            self._close(next(iter(self._open)))
        wait = self._open[session] = _Wait((tenant, tool), now)
        self._alike.setdefault(wait.key, {})[session] = None

    def end(self, session: str, now: float) -> list[Expected]:
        """Ends the session's wait and learns from it. No effect if it does not wait.

        Returns the other sessions that wait for the same tool, if the tool's time has just become known.
        """
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
        """Seconds that the tenant's next wait for the tool is expected to take: the mean less the deviation. None if
        too few waits have been seen, or if they differ too much."""
        known = self._tools.pop((tenant, tool), None)
        if known is None:
            return None
        self._tools[tenant, tool] = known
        return known.expected
