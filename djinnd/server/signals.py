"""What clients signal, on its way to the engines: no more of it than an engine can hear beside its work.

A signal is advice for the next moment, so of those that a session has sent only the last counts. They go on at the end
of the turn of the loop in which they came; where a user's sessions send more than that user's allowance, they wait in
line, one of each session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from djinn_client import protocol
from djinnd.messages import Signal
from djinnd.server.bucket import Bucket
from djinnd.server.sessions import SessionRecord

RATE = 1000.0  # a second that each user may send for long: those of a thousand sessions that wait for two seconds each
BURST = 256  # at once
_PERIOD = 0.01  # seconds until more of those that wait go on

_BULK = {"PREFILL": True, "DECODE": False}


class Due(NamedTuple):
    session: SessionRecord
    signal: Signal


class Line:
    """Signals of all users that have not gone on: of each session the last, with what is still to be known of those
    before it; of each user those first that came first."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[SessionRecord, Signal]] = {}  # by user; nobody has an empty one
        self._allowances: dict[int, Bucket] = {}  # by user

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, session: SessionRecord, signal: Signal) -> None:
        waiting = self._waiting.setdefault(session.user, {})
        earlier = waiting.get(session)
        if earlier is not None and signal.bulk is None:
            signal = replace(signal, bulk=earlier.bulk)
        waiting[session] = signal

    def take(self, at: float) -> Iterator[Due]:
        """Those that go on now."""
        for user, waiting in list(self._waiting.items()):
            allowance = self._allowances.setdefault(user, Bucket(RATE, BURST, at))
            due = list(waiting)[: int(allowance.level(at))]
            allowance.take(len(due), at)
            for session in due:
                yield Due(session, waiting.pop(session))
            if not waiting:
                del self._waiting[user]


class Signals:
    """`send` brings a signal to the session's engine, if it has one by then."""

    def __init__(self, send: Callable[[SessionRecord, Signal], None]) -> None:
        self._send = send
        self._line = Line()
        self._is_due = False

    def put(self, session: SessionRecord, signal: protocol.Signal) -> None:
        """A valid one."""
        waits, bulk = signal.kind == "IO_WAIT", _BULK.get(signal.kind)
        self._line.put(session, Signal(session.id, waits, signal.expected_s, signal.tool, bulk))
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
