"""Which models sleep: those that nobody has called for their keep_alive.

What counts is what asks for the model: a call on one of its sessions, from its receipt to its final reply, whether it
runs, waits, is held or is paused; a session that is opened, forked or imported; a pause until its pages are where they
go; and a load. Attached clients and signals do not.

A session with KV that a client gave keeps its model awake for as long as it is there: an engine that opened the session
anew could neither find that KV nor compute it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from djinnd.server.model import Model
from djinnd.server.sessions import SessionRecord, SessionTable


class KeepAlive:
    """`sleep` is called with a model that is ready, and due."""

    def __init__(self, sessions: SessionTable, sleep: Callable[[Model], None]) -> None:
        self._sessions = sessions
        self._sleep = sleep

    def begin(self, model: Model) -> None:
        """The model is ready, or has another keep_alive from now on."""
        self.end(model)
        if model.keep_alive and model.engine is not None:
            self._look_in(model, model.keep_alive)

    def end(self, model: Model) -> None:
        if model.next_look is not None:
            model.next_look.cancel()
            model.next_look = None

    def _look_in(self, model: Model, seconds: float) -> None:
        model.next_look = asyncio.get_running_loop().call_later(seconds, self._look, model)

    def _look(self, model: Model) -> None:
        model.next_look = None
        if model.engine is None:
            return  # when it is ready again, all begins anew
        sessions = self._sessions.of_model(model.name)
        rest = model.keep_alive - idle_seconds(model, sessions)
        if rest > 0:
            self._look_in(model, rest)
        elif any(session.salt for session in sessions):
            self._look_in(model, model.keep_alive)
        else:
            self._sleep(model)


def idle_seconds(model: Model, sessions: Collection[SessionRecord]) -> float:
    """Since the last call of the model, whose sessions these are; 0 while there is one."""
    if model.in_use or any(session.call is not None for session in sessions):
        return 0.0
    return max(time.monotonic() - max((model.used, *(session.used for session in sessions))), 0.0)
