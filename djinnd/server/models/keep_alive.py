"""Puts models to sleep that had no request for their keep_alive.

A model is in use while one of its sessions has a call: from its receipt to its final reply, whether it runs, waits, is
held or is paused. A session that is opened, forked or imported, a pause until its pages have moved, and a load count as
use too. Attached clients and signals do not.

A session with KV that a client gave keeps its model awake: another engine could neither find that KV nor compute it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from djinnd.server.models.model import ServedModel
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable


class KeepAlive:
    """Watches ready models. `sleep` is called with a model that has been idle for its keep_alive, unless another one
    needs it as its draft (`is_needed`)."""

    def __init__(
        self,
        sessions: SessionTable,
        sleep: Callable[[ServedModel], None],
        is_needed: Callable[[ServedModel], bool],
    ) -> None:
        self._sessions = sessions
        self._sleep = sleep
        self._is_needed = is_needed

    def begin(self, model: ServedModel) -> None:
        """Starts watching a model, when it is ready or its keep_alive has changed."""
        self.end(model)
        if model.keep_alive and model.engine is not None:
            self._check_in(model, model.keep_alive)

    def end(self, model: ServedModel) -> None:
        if model.next_look is not None:
            model.next_look.cancel()
            model.next_look = None

    def _check_in(self, model: ServedModel, seconds: float) -> None:
        model.next_look = asyncio.get_running_loop().call_later(seconds, self._check, model)

    def _check(self, model: ServedModel) -> None:
        model.next_look = None
        if model.engine is None:
            return  # watched again when it is ready
        sessions = self._sessions.of_model(model.name)
        rest = model.keep_alive - idle_seconds(model, sessions)
        if rest > 0:
            self._check_in(model, rest)
        elif self._is_needed(model) or any(session.salt for session in sessions):
            self._check_in(model, model.keep_alive)
        else:
            self._sleep(model)


def idle_seconds(model: ServedModel, sessions: Collection[SessionRecord]) -> float:
    """Seconds since the model's last call; 0 while there is one. `sessions` are those of the model."""
    if model.in_use or any(session.call is not None for session in sessions):
        return 0.0
    return max(time.monotonic() - max((model.used, *(session.used for session in sessions))), 0.0)
