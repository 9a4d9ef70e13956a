"""Several calls at once in one thread, each over a connection of its own."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from djinn_client.transport.steps import PAUSE_S, Steps, Wait

T = TypeVar("T")


class _Waiting(NamedTuple):
    wait: Wait
    until: float  # by time.monotonic; inf: only its event ends the wait

    @classmethod
    def of(cls, wait: Wait) -> _Waiting:
        seconds = PAUSE_S if wait.what == "pause" and wait.seconds is None else wait.seconds
        return cls(wait, inf if seconds is None else time.monotonic() + seconds)


def run_beside(calls: Sequence[Steps[T]]) -> list[T]:
    """Runs the calls to their ends and returns their results in order. Every call begins before any is waited for. When
    one of them raises, the others are given up."""
    results: dict[int, T] = {}
    waits: dict[int, _Waiting] = {}
    able = set(range(len(calls)))
    try:
        while len(results) < len(calls):
            for number in sorted(able):
                try:
                    waits[number] = _Waiting.of(next(calls[number]))
                except StopIteration as end:
                    waits.pop(number, None)
                    results[number] = end.value
            able = _able(waits)
        return [results[number] for number in range(len(calls))]
    finally:
        for call in calls:
            call.close()


def _able(waits: Mapping[int, _Waiting]) -> set[int]:
    """Waits until at least one of the calls can go on, and returns the numbers of those that can."""
    if not waits:
        return set()
    poll = select.poll()
    number_of = {waiting.wait.fd: number for number, waiting in waits.items() if waiting.wait.what != "pause"}
    for fd, number in number_of.items():
        poll.register(fd, select.POLLIN if waits[number].wait.what == "read" else select.POLLOUT)
    first = min(waiting.until for waiting in waits.values())
    ready = poll.poll(None if first == inf else max(0.0, first - time.monotonic()) * 1000)
    now = time.monotonic()
    return {number_of[fd] for fd, _ in ready} | {number for number, waiting in waits.items() if waiting.until <= now}
