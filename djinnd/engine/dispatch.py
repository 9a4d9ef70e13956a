"""Hands each message of the server to its handler, in the order in which the messages came.

    channel ──► received ─┬─ between two steps: all messages, except a last part that can overlap with the next step
                          └─ during a step: up to the first message that must wait for the step's end

The device idles while messages are handled between two steps. A message takes up to one or two milliseconds when the
caches have lost the code. During a step, only messages are handled that change nothing the step uses: neither its rows
nor their state on the device. Such a message may make a session leave the device or come back. That is safe, because a
session that gives up pages has no row in the step, and copies into free pages begin in a later turn, after the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from djinn_client.errors import DjinnError, SessionNotFound
from djinnd import messages
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.requests import Requests
from djinnd.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class Dispatcher:
    """Owns the messages that have been received and not handled. Used by the engine's thread."""

    _channel: ServerChannel
    _scheduler: Scheduler
    _requests: Requests
    _handlers: Mapping[type, Callable[[Any], None]]  # by type of message
    _received: deque[messages.ToEngine] = field(init=False, default_factory=deque)
    _calls: int = field(init=False, default=0)  # Runs handled since the last `take_calls`

    def receive(self, patience: float) -> bool:
        """Waits up to `patience` seconds for a message, unless there is one. → True if there is one. Raises
        ServerGone."""
        self._received.extend(self._channel.receive(0.0 if self._received else patience))
        return bool(self._received)

    def handle_between_steps(self, *, step_follows: bool = False) -> None:
        """Handles messages between two steps. With `step_follows`, messages at the end of the queue that no running
        request waits for stay there, because they can overlap with the next step."""
        self._scheduler.tick(time.monotonic())
        waits = sum(1 for _ in takewhile(self._can_wait, reversed(self._received))) if step_follows else 0
        while len(self._received) > waits:
            self._handle(self._received.popleft())

    def handle_during_step(self) -> bool:
        """Handles messages while a step runs, up to the first that must wait. → True if more may be handled. Raises
        ServerGone."""
        if not self._received and self.receive(0.0):
            self._scheduler.tick(time.monotonic())
        while self._received and self._can_overlap(self._received[0]):
            self._handle(self._received.popleft())
        return not self._received

    @property
    def has_some(self) -> bool:
        """True if messages have been received and wait for the end of the step."""
        return bool(self._received)

    def take_calls(self) -> int:
        """The number of Runs handled since the last call."""
        calls, self._calls = self._calls, 0
        return calls

    def _handle(self, message: messages.ToEngine) -> None:
        """A DjinnError of a call's handler is the call's answer."""
        self._calls += type(message) is messages.Run
        try:
            self._handlers[type(message)](message)
        except DjinnError as error:
            if not isinstance(message, messages.EngineCall | messages.Run | messages.ExportKv):
                raise
            self._channel.refuse(message.request, error)

    def _can_wait(self, message: messages.ToEngine) -> bool:
        """True for Pause and Resume of an idle session: no call waits for these pages, and the bookkeeping takes a
        millisecond."""
        return isinstance(message, messages.Pause | messages.Resume) and self._is_idle(message.session)

    def _can_overlap(self, message: messages.ToEngine) -> bool:
        match message:
            case messages.Run():
                return self._requests.is_plain(message)
            case messages.Pause():
                return self._is_idle(message.session)
            case messages.Inquire():
                return not message.check
        return isinstance(message, messages.Signal | messages.Resume | messages.Open)

    def _is_idle(self, session: str) -> bool:
        """True if the session has no request. A session that does not exist has no row in the step either."""
        try:
            return self._scheduler.session(session).request is None
        except SessionNotFound:
            return True
