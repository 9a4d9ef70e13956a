"""Finds the handler of each request, and makes the checks that all requests have in common.

Handlers stand in a class for each theme: see wire/request_handler.py. A handler awaits nothing between finding the
engine and sending to it, so that session, model and engine are still as it found them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import get_args

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, SessionNotFound, ShuttingDown
from djinnd.messages import Signal
from djinnd.server.engines.supervisor import Supervisor
from djinnd.server.handover.stopping import Restart
from djinnd.server.journal.journal import Journal
from djinnd.server.loading.models import ModelTable
from djinnd.server.loading.sharing import ShareTable
from djinnd.server.principals.tokens import Tokens
from djinnd.server.quotas.queueing import Queue
from djinnd.server.requests.daemon import DaemonRequests
from djinnd.server.requests.embeddings import EmbedRequests
from djinnd.server.requests.explain import ExplainRequests
from djinnd.server.requests.export import ExportRequests
from djinnd.server.requests.models import ModelRequests
from djinnd.server.requests.sessions import SessionRequests
from djinnd.server.requests.tokenizer import TokenizerRequests
from djinnd.server.requests.tokens import TokenRequests
from djinnd.server.requests.work import WorkRequests
from djinnd.server.runs.failover import RunFailover
from djinnd.server.sessions.prefixes import PrefixTable
from djinnd.server.sessions.records import RecordTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.sessions.signals import Signals
from djinnd.server.status.status import Status
from djinnd.server.text.texts import Texts
from djinnd.server.whitebox.breakpoint_requests import BreakpointRequests
from djinnd.server.whitebox.edit_requests import EditRequests
from djinnd.server.whitebox.functions import FunctionRequests
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.request_handler import Handler, Handling, handlers_of

log = logging.getLogger("djinnd.server")


class Handlers:
    """The handlers by type of request."""

    def __init__(
        self,
        sessions: SessionTable,
        models: ModelTable,
        texts: Texts,
        sharing: ShareTable,
        prefixes: PrefixTable,
        records: RecordTable,
        queue: Queue,
        status: Status,
        supervisor: Supervisor,
        functions: FunctionRequests,
        journal: Journal,
        tokens: Tokens,
        restart: Callable[[Restart], Awaitable[None]],
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._status = status
        self._journal = journal
        self._signals = Signals(self._tell_signal)
        failover = RunFailover(models)
        of_work = WorkRequests(sessions, models, texts, queue, failover, records)
        parts = (
            SessionRequests(sessions, models, status),
            of_work,
            EmbedRequests(sessions, models, of_work.generate),
            TokenizerRequests(models, texts),
            ExportRequests(sessions, models, status, failover),
            ExplainRequests(sessions, models, supervisor, status),
            EditRequests(sessions, models),
            BreakpointRequests(sessions, models, functions),
            functions,
            records,
            ModelRequests(sessions, models, sharing, status),
            DaemonRequests(
                sessions, models, prefixes, supervisor, status, restart, lambda: [*journal.notes, *tokens.notes]
            ),
            TokenRequests(tokens),
        )
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
