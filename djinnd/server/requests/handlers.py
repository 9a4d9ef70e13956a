"""Finds the handler of each request, and makes the checks that all requests have in common.

A handler is a small coroutine of a class for its theme. It returns the final reply or raises an error, which the client
receives. A handler awaits nothing between finding the engine and sending to it, so that session, model and engine are
still as it found them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

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
from djinnd.server.sessions.sessions import SessionRecord, SessionTable
from djinnd.server.sessions.signals import Signals
from djinnd.server.status.status import Status
from djinnd.server.text.texts import Texts
from djinnd.server.whitebox.breakpoint_requests import BreakpointRequests
from djinnd.server.whitebox.edit_requests import EditRequests
from djinnd.server.whitebox.functions import FunctionRequests
from djinnd.server.wire.client import ClientCall, ConnectedClient, FinalReply

log = logging.getLogger("djinnd.server")

# Refused while the daemon stops.
_NEW_WORK = (
    protocol.OpenSession,
    protocol.ForkSession,
    protocol.Generate,
    protocol.Embed,
    protocol.KeepRecord,
    protocol.AddEdit,
    protocol.AddBreakpoint,
    protocol.AddFunction,
    protocol.RunFunctions,
    protocol.Forward,
    protocol.ExportSession,
    protocol.ImportSession,
    protocol.PauseSession,
    protocol.PublishPrefix,
    protocol.LoadModel,
    protocol.PlanModel,
    protocol.HandOverFiles,
    protocol.ShareModel,
    protocol.ShareWeights,
    protocol.SetBudget,
    protocol.GetTrace,
    protocol.Restart,
)
# Change something that the journal stores: refused if it cannot be written. Closing a session gives room back, and is
# always allowed.
_CHANGES = (
    protocol.OpenSession,
    protocol.ForkSession,
    protocol.ImportSession,
    protocol.Generate,
    protocol.Embed,
    protocol.AddEdit,
    protocol.EndEdits,
    protocol.AddBreakpoint,
    protocol.EndBreakpoints,
    protocol.RunFunctions,
    protocol.Forward,
    protocol.Truncate,
    protocol.SetPriority,
    protocol.PublishPrefix,
    protocol.WithdrawPrefix,
    protocol.KeepRecord,
    protocol.DropRecord,
)

# Changes that make the journal larger: refused at the user's limit.
_GROWS = (
    protocol.OpenSession,
    protocol.ForkSession,
    protocol.ImportSession,
    protocol.Generate,
    protocol.Embed,
    protocol.Forward,
    protocol.AddEdit,
    protocol.AddBreakpoint,
    protocol.RunFunctions,
)

# A lookup in a set takes 0.05 us; isinstance calls each Struct's metaclass, which takes 2 us in all.
_is_new_work, _changes, _grows = (frozenset(kinds).__contains__ for kinds in (_NEW_WORK, _CHANGES, _GROWS))


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
        of_sessions = SessionRequests(sessions, models, status)
        failover = RunFailover(models)
        of_work = WorkRequests(sessions, models, texts, queue, failover, records)
        of_tokenizers = TokenizerRequests(models, texts)
        of_models = ModelRequests(sessions, models, sharing, status)
        of_daemon = DaemonRequests(
            sessions, models, prefixes, supervisor, status, restart, lambda: [*journal.notes, *tokens.notes]
        )
        of_edits = EditRequests(sessions, models)
        of_breakpoints = BreakpointRequests(sessions, models, functions)
        of_tokens = TokenRequests(tokens)
        of_embeddings = EmbedRequests(sessions, models, of_work.generate)
        of_exports = ExportRequests(sessions, models, status, failover)
        of_explanations = ExplainRequests(sessions, models, supervisor, status)
        self._handlers: dict[type, Callable[[ClientCall, Any], Awaitable[FinalReply]]] = {
            protocol.OpenSession: of_sessions.open,
            protocol.AttachSession: of_sessions.attach,
            protocol.ForkSession: of_sessions.fork,
            protocol.CloseSession: of_sessions.close,
            protocol.Truncate: of_sessions.truncate,
            protocol.PauseSession: of_sessions.pause,
            protocol.ResumeSession: of_sessions.resume,
            protocol.SetPriority: of_sessions.set_priority,
            protocol.GetTokens: of_sessions.get_tokens,
            protocol.Tokenize: of_tokenizers.tokenize,
            protocol.Detokenize: of_tokenizers.detokenize,
            protocol.DescribeTokenizer: of_tokenizers.describe,
            protocol.ListSessions: of_sessions.list_sessions,
            protocol.ExportSession: of_exports.export,
            protocol.ImportSession: of_exports.import_,
            protocol.ExplainSession: of_explanations.explain,
            protocol.AddEdit: of_edits.add,
            protocol.EndEdits: of_edits.end,
            protocol.ListEdits: of_edits.list_edits,
            protocol.AddBreakpoint: of_breakpoints.add,
            protocol.EndBreakpoints: of_breakpoints.end,
            protocol.ListBreakpoints: of_breakpoints.list_breakpoints,
            protocol.AddFunction: functions.add,
            protocol.RunFunctions: functions.run,
            protocol.Generate: of_work.generate,
            protocol.Forward: of_work.forward,
            protocol.Embed: of_embeddings.embed,
            protocol.KeepRecord: records.keep,
            protocol.GetRecord: records.get,
            protocol.DropRecord: records.drop,
            protocol.ListRecords: records.list_records,
            protocol.ListModels: of_models.list_models,
            protocol.LoadModel: of_models.load,
            protocol.PlanModel: of_models.plan,
            protocol.HandOverFiles: of_models.hand_over_files,
            protocol.UnloadModel: of_models.unload,
            protocol.ShareModel: of_models.share_model,
            protocol.ShareWeights: of_models.share_weights,
            protocol.EndShare: of_models.end_share,
            protocol.Ping: of_daemon.ping,
            protocol.GetStatus: of_daemon.get_status,
            protocol.GetQuotas: of_daemon.get_quotas,
            protocol.SetBudget: of_daemon.set_budget,
            protocol.GetTrace: of_daemon.trace,
            protocol.Restart: of_daemon.restart,
            protocol.AddToken: of_tokens.add,
            protocol.ListTokens: of_tokens.list_tokens,
            protocol.RevokeToken: of_tokens.revoke,
            protocol.PublishPrefix: of_daemon.publish_prefix,
            protocol.ListPrefixes: of_daemon.list_prefixes,
            protocol.WithdrawPrefix: of_daemon.withdraw_prefix,
        }

    async def handle(self, call: ClientCall, request: protocol.Request) -> FinalReply:
        if self._status.is_draining and _is_new_work(type(request)):
            raise ShuttingDown("the daemon is stopping and takes no new work: try again when it is back")
        if _changes(type(request)):
            self._journal.expect_writable()
        if _grows(type(request)):
            self._sessions.expect_journal(call.client.tenant, 0)
        return await self._handlers[type(request)](call, request)

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
