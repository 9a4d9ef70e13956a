"""Handlers that export and import sessions: their tokens, and their KV in windows, which the engine copies.

The daemon cannot check what tokens a client's KV belongs to. So the session gets a salt of its own, and no other
session finds its pages. It is not in the journal, and is lost with its engine.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from djinn_client.errors import Cancelled, DjinnError, InvalidRequest, ModelMismatch
from djinn_client.protocol import Done, ExportSession, ImportSession, ModelInfo, SessionExported, SessionOpened
from djinn_client.protocol.fields.kv_layout import FP8
from djinnd.messages import ExportKv, Finished, ImportKv, KvExported
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.admission import admission
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.loader import open_in
from djinnd.server.loading.models import ModelTable, expect_open, expect_whole
from djinnd.server.runs.failover import RunFailover
from djinnd.server.runs.runs import SessionRun
from djinnd.server.sessions.session import TOKEN_BYTES, SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.memfds import open_window
from djinnd.server.wire.request_handler import handles

SALT_BYTES = 16


@dataclass(eq=False)
class ExportRequests:
    """The requests about export and import. Nothing is awaited between finding the engine and sending to it: see
    handlers.py."""

    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _status: Status
    _failover: RunFailover

    @handles(ExportSession, is_new_work=True)
    async def export(self, call: ClientCall, request: ExportSession) -> SessionExported | FinalReply:
        session = self._sessions.lookup(request.session, call.client)
        call.client.expect_class(session.priority)
        if session.adapter is not None:
            raise InvalidRequest(
                f"session {session.id} has an adapter: such sessions are not exported", field="session"
            )
        with session.in_use(call):
            info, _ = (await self._models.once_ready(session)).described
            reply = SessionExported(id=call.id, token_ids=list(session.tokens), fingerprint=info.fingerprint)
            if not request.kv:
                return reply
            if not session.tokens:
                raise InvalidRequest("the session is empty: it has no KV")
            session.tenant.expect_tokens(call.received)
            engine = await self._adapters.engine_for(session)
            session.expect_model()
            reply.kv = info.kv_layout
            _expect_no_states(info)
            call.reserve_window(reply.kv.nbytes(len(session.tokens)))
            return await self._failover.answer(call, ExportRun(call, session, engine, reply))

    @handles(ImportSession, is_new_work=True, journal="grows")
    async def import_(self, call: ClientCall, request: ImportSession) -> SessionOpened:
        window = call.descriptor if request.kv is not None or call.fds else None
        if (request.kv is not None) != (window is not None):
            raise InvalidRequest("KV comes with the descriptor of a window, and a window only with KV", field="kv")
        model = await self._models.named(request.model, call.client)
        expect_open(model)
        expect_whole(model)
        priority = call.client.class_for(request.priority)
        tenant = self._sessions.expect_room(call.client.user, priority)  # before a load that would be in vain
        if request.kv is None:
            self._sessions.expect_journal(tenant, TOKEN_BYTES * len(request.token_ids))
        uncomputed = len(request.token_ids) - (request.kv_tokens if request.kv is not None else 0)
        if uncomputed > 0:
            tenant.expect_tokens(call.received)
        engine = await self._models.ready(model.name, call.tell_loading, user=call.client.user)
        model = self._models.find_open(model.name, call.client)  # a share may have ended meanwhile
        info, _ = model.described
        _check(request, info)
        salt = b"" if window is None else secrets.token_bytes(SALT_BYTES)
        ours: int | None = None
        if window is not None and request.kv is not None:
            ours = open_window(window, request.kv.nbytes(request.kv_tokens), "the KV", for_good=False)
        try:
            session = self._sessions.open(call.client, model.name, priority, model.share is not None, salt)
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        session.tokens = request.token_ids
        session.changed()
        session.charge_journal()
        if ours is None:
            open_in(engine, session)
            return SessionOpened(id=call.id, session=self._status.session_info(session))
        with session.in_use(call):
            engine.set_tenants([tenant.limits])
            run = ImportRun(call, session, engine, self._sessions, request.kv_tokens, ours)
            call.client.started(call, run)
            await run.done
        return SessionOpened(id=call.id, session=self._status.session_info(session))


class ExportRun(SessionRun):
    """Exports a session's KV. `reply` lacks only the fields that the engine will give. If it is cancelled while KV is
    still being computed, it ends with Cancelled; while KV is being copied, it completes."""

    def __init__(self, call: ClientCall, session: SessionRecord, engine: EngineClient, reply: SessionExported) -> None:
        super().__init__(call, session)
        self._reply = reply
        self.submit(engine)
        self._started = True

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        return engine.run(self, ExportKv, session=self._session.id)

    def exported(self, message: KvExported, fd: int) -> None:
        self._reply.kv_tokens = message.tokens
        self.done.set_result(FinalReply(self._reply, [fd]))


class ImportRun(SessionRun):
    """Imports a session's KV. Owns the window's descriptor. If it fails, the session is closed."""

    def __init__(
        self,
        call: ClientCall,
        session: SessionRecord,
        engine: EngineClient,
        sessions: SessionTable,
        kv_tokens: int,
        window: int,
    ) -> None:
        super().__init__(call, session)
        self._sessions = sessions
        self._kv_tokens = kv_tokens
        self._window = window
        self.submit(engine)
        self._started = True

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        session = self._session
        return engine.run(
            self,
            ImportKv,
            [self._window],
            session=session.id,
            model=session.model,
            tenant=session.user,
            priority=session.priority,
            tokens=session.tokens,
            kv_tokens=self._kv_tokens,
            salt=session.salt,
        )

    def cancel(self) -> None:
        """Remembers the cancellation. The copy is completed, which takes little time."""
        self.is_cancelled = True

    def hold(self, held: bool) -> None:
        self._held = held

    def finished(self, message: Finished) -> None:
        if self.is_cancelled:
            self.failed(Cancelled("the request was cancelled"))
        else:
            self.done.set_result(FinalReply(Done(id=0)))

    def failed(self, error: DjinnError) -> None:
        self.done.set_exception(error)
        self._sessions.close(self._session)

    def lost(self, error: DjinnError, blamed: bool) -> None:
        """Fails, because the window is lost with the engine and its KV cannot be computed again."""
        self.failed(error)


def _check(request: ImportSession, info: ModelInfo) -> None:
    """Checks that the session fits the model. Raises ModelMismatch, InvalidRequest, TokenOutOfRange, PromptTooLong."""
    if request.fingerprint not in ("", info.fingerprint):
        raise ModelMismatch(
            f"the session belongs to a model with the fingerprint {request.fingerprint[:64]}, {info.name} has "
            f"{info.fingerprint}: load the model that it was saved with, or open a new session with its tokens",
            saved=request.fingerprint[:64],
            model=info.fingerprint,
        )
    if request.token_ids:
        admission.check_prompt(request.token_ids, 0, info, room=0)
    if request.kv is None:
        return
    _expect_no_states(info)
    if not 0 < request.kv_tokens <= len(request.token_ids):
        raise InvalidRequest(
            f"KV of {request.kv_tokens:,} tokens came with {len(request.token_ids):,} tokens: every token whose KV is "
            "handed over must be named",
            field="kv_tokens",
        )
    if request.kv != info.kv_layout:
        remedy = "hand over the tokens only"
        if FP8 in (given := request.kv.dtype, info.kv_layout.dtype) and given != info.kv_layout.dtype:
            remedy += f", or load the model with kv_dtype={'fp8' if given == FP8 else 'auto'}"
        raise InvalidRequest(f"{info.name} has {info.kv_layout}; the given KV has {request.kv}: {remedy}", field="kv")


def _expect_no_states(info: ModelInfo) -> None:
    """Raises InvalidRequest for a hybrid model: the last token of handed-over KV is run again, and for that its state
    before this token would be needed."""
    if info.kv_layout.state_bytes:
        raise InvalidRequest(
            f"{info.name} is a hybrid model, and KV with states is not handed over yet: hand over the tokens only",
            field="kv",
        )
