"""Passes clients' signals to the engines, at a rate that an engine can handle beside its work.

A signal is a hint for the next moment, so only the last one of each session counts. Signals go on at the end of the
turn of the loop in which they came. If the sessions of a user send more than its allowance, they wait in a queue, at
most one for each session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from djinn_client import protocol
from djinnd.messages import Signal
from djinnd.server.quotas.bucket import Bucket
from djinnd.server.sessions.session import SessionRecord

RATE = 1000.0  # per second and user, sustained: a thousand sessions that wait two seconds each send so many
BURST = 256  # at once, per user
_PERIOD = 0.01  # seconds between two releases of waiting signals


class Due(NamedTuple):
    """A signal that goes on now."""

    session: SessionRecord
    signal: Signal


class SignalQueue:
    """The waiting signals of all users. For each session only the last signal is kept. A user's signals
    leave in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[SessionRecord, Signal]] = {}  # by user; never empty
        self._allowances: dict[int, Bucket] = {}  # by user

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, session: SessionRecord, signal: Signal) -> None:
        self._waiting.setdefault(session.user, {})[session] = signal

    def take(self, at: float) -> Iterator[Due]:
        """Yields the signals to pass on now, within the users' allowances."""
        for user, waiting in list(self._waiting.items()):
            allowance = self._allowances.setdefault(user, Bucket(RATE, BURST, at))
            due = list(waiting)[: int(allowance.level(at))]
            allowance.take(len(due), at)
            for session in due:
                yield Due(session, waiting.pop(session))
            if not waiting:
                del self._waiting[user]


class Signals:
    """Queues signals and passes them on. `send` passes a signal to the session's engine, if it has one then."""

    def __init__(self, send: Callable[[SessionRecord, Signal], None]) -> None:
        self._send = send
        self._line = SignalQueue()
        self._is_due = False

    def put(self, session: SessionRecord, signal: protocol.Signal) -> None:
        """Queues a valid signal."""
        waits = signal.kind == "IO_WAIT"
        self._line.put(session, Signal(session.id, waits, signal.expected_s, signal.tool))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        for session, signal in self._line.take(loop.time()):
            self._send(session, signal)
        self._is_due = len(self._line) > 0
        if self._is_due:
            loop.call_later(_PERIOD, self._go_on)
