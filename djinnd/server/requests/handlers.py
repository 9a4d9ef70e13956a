"""Finds the handler of each request, and makes the checks that all requests have in common.

Handlers stand in a class for each theme: see wire/request_handler.py. A handler awaits nothing between finding the
engine and sending to it, so that session, model and engine are still as it found them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import get_args

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, SessionNotFound, ShuttingDown
from djinnd.messages import Signal
from djinnd.server.journal.journal import Journal
from djinnd.server.loading.models import ModelTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.sessions.signals import Signals
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.request_handler import Handler, Handling, handlers_of

log = logging.getLogger("djinnd.server")


class Handlers:
    """The handlers by type of request. `parts` declare them."""

    def __init__(
        self, sessions: SessionTable, models: ModelTable, status: Status, journal: Journal, parts: Iterable[object]
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._status = status
        self._journal = journal
        self._signals = Signals(self._tell_signal)
        handled = [each for part in parts for each in handlers_of(part)]
        self._handlers: dict[type, tuple[Handling, Handler]] = {each[0].kind: each for each in handled}
        assert self._handlers.keys() == {*get_args(protocol.union_of(protocol.Request))} - {protocol.Hello}

    async def handle(self, call: ClientCall, request: protocol.Request) -> FinalReply:
        handling, handler = self._handlers[type(request)]
        if handling.is_new_work and self._status.is_draining:
            raise ShuttingDown("the daemon is stopping and takes no new work: try again when it is back")
        if handling.journal:
            self._journal.expect_writable()
        if handling.journal == "grows":
            self._sessions.expect_journal(call.client.tenant, 0)
        answer = await handler(call, request)
        return answer if isinstance(answer, FinalReply) else FinalReply(answer or protocol.Done(id=call.id))

    def signal(self, client: ConnectedClient, signal: protocol.Signal) -> None:
        """Handles a one-way message. Errors are only logged, as there is no reply."""
        try:
            signal.validate()
            session = self._sessions.lookup(signal.session, client)
        except (InvalidRequest, SessionNotFound) as error:
            log.debug("signal_ignored user=%d reason=%s", client.user, error)
            return
        session.woken_at = 0.0 if signal.kind == "IO_WAIT" else time.monotonic()
        self._signals.put(session, signal)

    def _tell_signal(self, session: SessionRecord, signal: Signal) -> None:
        engine = self._models.engine_of(session)
        if engine is not None and session in self._sessions:  # else no engine has any of its pages
            engine.send(signal)
            if not signal.waits:  # the pages travel while the session's next call is still being read
                engine.flush()
