"""The journal's time: seconds since 1970 when the journal began, plus the time that has really passed since then.

Sessions end after a time without use. By the wall clock all of them would end at once if it is set forward. So while a
daemon runs, the journal's time follows CLOCK_MONOTONIC. The time between two daemons is known by the wall clock alone,
and counts for at most DOWNTIME. A wall clock that was set back counts as no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

DOWNTIME = 86400.0  # seconds


class ClockMark(NamedTuple):
    """The journal's time and the wall clock at one moment."""

    at: float
    wall: float


def resumed(mark: ClockMark | None, last: float | None, wall: float) -> float:
    """The journal's time when a daemon starts. `last`: the latest time in the journal, or None. `wall`: the wall
    clock."""
    if mark is None:
        mark = ClockMark(wall, wall) if last is None else ClockMark(last, last)
    last = mark.at if last is None else max(last, mark.at)
    away = wall - (mark.wall + last - mark.at)
    return last + min(max(away, 0.0), DOWNTIME)


class JournalClock:
    """Converts CLOCK_MONOTONIC to the journal's time."""

    def __init__(self, at: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`at`: the journal's time now."""
        self._monotonic = monotonic
        self._ahead = at - monotonic()

    def now(self) -> float:
        return self.at(self._monotonic())

    def at(self, monotonic: float) -> float:
        """The journal's time at a time of CLOCK_MONOTONIC."""
        return monotonic + self._ahead

    def mark(self) -> ClockMark:
        return ClockMark(self.now(), time.time())
