"""Counts a walk: the files that a value passes, and how often it comes back to a file that it has left.

Processes run at the same time, so their events interleave differently in each run. So the walk goes through a value's
processes one after the other, in the order in which the value reached them. A prompt's walk has two values, the prompt
and then the token that was sampled; the token's walk comes second.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Event(NamedTuple):
    """A function had the value: it received it (`call`) or returned it (`return`)."""

    at: int  # nanoseconds, the same clock in every process
    pid: int
    value: str
    kind: str
    path: str
    function: str


class Route(NamedTuple):
    """The files in the order of the walk; two that follow each other differ."""

    files: list[str]

    @property
    def distinct(self) -> int:
        return len(set(self.files))

    @property
    def returns(self) -> int:
        """How often the walk enters a file that it has left before."""
        return len(self.files) - self.distinct

    def __str__(self) -> str:
        return "\n".join([*self.files, f"{self.distinct} files, {self.returns} returns"])


def route(events: Iterable[Event]) -> Route:
    in_time = sorted(events)
    values = list(dict.fromkeys(event.value for event in in_time))
    stays = list(dict.fromkeys((event.value, event.pid) for event in in_time))
    walk = sorted(in_time, key=lambda event: (values.index(event.value), stays.index((event.value, event.pid))))
    return Route([path for path, _ in groupby(event.path for event in walk)])
