"""Several calls at once in one thread, each over a connection of its own."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from typing import TypeVar

from djinn_client.transport.steps import PAUSE_S, Steps, Wait

T = TypeVar("T")


def run_beside(calls: Sequence[Steps[T]]) -> list[T]:
    """Runs the calls to their ends and returns their results in order. Every call begins before any is waited for. When
    one of them raises, the others are given up."""
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    able = set(range(len(calls)))
    try:
        while len(results) < len(calls):
            for number in sorted(able):
                try:
                    waits[number] = next(calls[number])
                except StopIteration as end:
                    waits.pop(number, None)
                    results[number] = end.value
            able = _able(waits)
        return [results[number] for number in range(len(calls))]
    finally:
        for call in calls:
            call.close()


def _able(waits: Mapping[int, Wait]) -> set[int]:
    """Waits until at least one of the calls can go on, and returns the numbers of those that can."""
    poll = select.poll()
    pausing = {number for number, wait in waits.items() if wait.what == "pause"}
    number_of = {wait.fd: number for number, wait in waits.items() if wait.what != "pause"}
    for fd, number in number_of.items():
        poll.register(fd, select.POLLIN if waits[number].what == "read" else select.POLLOUT)
    if not waits:
        return set()
    ready = poll.poll(PAUSE_S * 1000 if pausing else None)
    return pausing | {number_of[fd] for fd, _ in ready}
