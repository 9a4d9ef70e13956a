"""What the server says to the engine: each message, in its order, to its handler.

    channel ──► unheard ─┬─ between two steps: all of them, but for what may as well be heard beside the next one
                         └─ beside a step: up to the first that has to wait until it is over

Between two steps the device would wait for each of them, up to a millisecond or two where caches have forgotten the
code. Beside one is heard what changes nothing that the step needs, neither its rows nor what they have on the device.
It may lead to somebody's leaving the device, or coming back: nobody who makes room then has a row, and copies into
pages that are free begin in a later turn, behind the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from djinn_client.errors import SessionNotFound
from djinnd import messages
from djinnd.engine.channel import Channel
from djinnd.engine.requests import Requests
from djinnd.scheduler.scheduler import Scheduler


class Mailbox:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler,
        requests: Requests,
        handlers: Mapping[type, Callable[[Any], None]],
    ) -> None:
        """`handlers`: by type of message."""
        self._channel = channel
        self._scheduler = scheduler
        self._requests = requests
        self._handlers = handlers
        self._unheard: deque[messages.ToEngine] = deque()
        self._calls = 0  # heard since they were last taken

    def receive(self, patience: float) -> bool:
        """Waits so many seconds for a message, if there is none yet. → whether there is one. Raises ServerGone."""
        self._unheard.extend(self._channel.receive(0.0 if self._unheard else patience))
        return bool(self._unheard)

    def hear(self, *, before_step: bool = False) -> None:
        """Between two steps: what has been received, but for the last of it that nobody who runs waits for, and that
        the next step may as well be beside."""
        self._scheduler.tick(time.monotonic())
        waits = sum(1 for _ in takewhile(self._can_wait, reversed(self._unheard))) if before_step else 0
        while len(self._unheard) > waits:
            self._hand_over(self._unheard.popleft())

    def hear_beside(self) -> bool:
        """While a step runs: what has come, and does not have to wait. → whether more may be heard. Raises
        ServerGone."""
        if not self._unheard and self.receive(0.0):
            self._scheduler.tick(time.monotonic())
        while self._unheard and self._may_be_heard_beside(self._unheard[0]):
            self._hand_over(self._unheard.popleft())
        return not self._unheard

    def take_calls(self) -> int:
        """How many have begun since this was last asked."""
        calls, self._calls = self._calls, 0
        return calls

    def _hand_over(self, message: messages.ToEngine) -> None:
        self._calls += type(message) is messages.Run
        self._handlers[type(message)](message)

    def _can_wait(self, message: messages.ToEngine) -> bool:
        """Pages are to leave or to come back that no call waits for, a millisecond's books of them."""
        return isinstance(message, messages.Pause | messages.Resume) and self._is_idle(message.session)

    def _may_be_heard_beside(self, message: messages.ToEngine) -> bool:
        match message:
            case messages.Run():
                return self._requests.is_plain(message)
            case messages.Pause():
                return self._is_idle(message.session)
            case messages.Inquire():
                return not message.check
        return isinstance(message, messages.Signal | messages.Resume | messages.Open)

    def _is_idle(self, session: str) -> bool:
        """One that is not there is none that the step has a row of."""
        try:
            return self._scheduler.session(session).request is None
        except SessionNotFound:
            return True
