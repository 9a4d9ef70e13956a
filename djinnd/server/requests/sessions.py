"""Handlers of requests about sessions: to open, fork, close, cut, pause and list them, and to change their class.

Nothing is awaited between finding the engine and sending to it, so that session, model and engine are still as they
were found. A session without an engine is changed in the table only: the next engine receives its state when it opens
it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from djinn_client import protocol
from djinn_client.errors import DjinnError, EngineLost
from djinn_client.protocol import PauseReply, SessionOpened, Sessions, TokenIds
from djinnd.messages import Fork, Pause, Paused, Resume, SetClass, Truncate
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.admission import admission
from djinnd.server.loading.loader import open_in
from djinnd.server.loading.models import ModelTable, expect_open, expect_whole
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

log = logging.getLogger("djinnd.server")


@dataclass(eq=False)
class SessionRequests:
    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _status: Status

    @handles(protocol.OpenSession, is_new_work=True, journal="grows")
    async def open(self, call: ClientCall, request: protocol.OpenSession) -> SessionOpened:
        name, adapter_name = self._models.split(request.model)
        model = await self._models.named(name, call.client)
        expect_open(model)
        expect_whole(model)
        priority = call.client.class_for(request.priority)
        self._sessions.expect_room(call.client.user, priority)  # before a load that would be in vain
        named = await self._adapters.named(model, request.adapter or adapter_name, call.client)
        engine = await self._models.ready(model.name, call.tell_loading, user=call.client.user)
        engine, adapter = await self._adapters.chosen(model, named)
        self._models.find_open(model.name, call.client)  # a share may have ended meanwhile
        is_shared = model.share is not None
        session = self._sessions.open(call.client, model.name, priority, is_shared, adapter=adapter)
        open_in(engine, session)
        return SessionOpened(id=call.id, session=self._status.session_info(session))

    @handles(protocol.AttachSession)
    async def attach(self, call: ClientCall, request: protocol.AttachSession) -> SessionOpened:
        session = self._sessions.lookup(request.session, call.client)
        self._sessions.attach(session, call.client)
        return SessionOpened(id=call.id, session=(await self._status.session_infos([session]))[0])

    @handles(protocol.ForkSession, is_new_work=True, journal="grows")
    async def fork(self, call: ClientCall, request: protocol.ForkSession) -> SessionOpened:
        parent = self._sessions.lookup(request.session, call.client)
        parent.expect_model()
        engine = self._models.find_open(parent.model, call.client).engine
        priority = request.priority or parent.priority
        call.client.expect_class(priority)
        session = self._sessions.fork(parent, call.client, priority)
        if engine is not None:
            engine.send(Fork(session.id, parent.id, session.priority))
        return SessionOpened(id=call.id, session=self._status.session_info(session))

    @handles(protocol.CloseSession)
    async def close(self, call: ClientCall, request: protocol.CloseSession) -> None:
        self._sessions.close(self._sessions.lookup(request.session, call.client))

    @handles(protocol.Truncate, journal="changes")
    async def truncate(self, call: ClientCall, request: protocol.Truncate) -> None:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        admission.check_truncate(request.length, len(session.tokens))
        if request.length < len(session.tokens):
            session.cut(request.length)
            self._models.tell(session, Truncate(session.id, request.length))

    @handles(protocol.PauseSession, is_new_work=True)
    async def pause(self, call: ClientCall, request: protocol.PauseSession) -> PauseReply:
        """Pauses a session, also during a call. Without an engine, or if it is lost meanwhile, the next engine opens
        the session as paused."""
        admission.check_pause(request)
        session = self._sessions.lookup(request.session, call.client)
        engine, paused = self._models.engine_of(session), Paused(0, pages=0, nbytes=0, seconds=0.0)
        was_paused, session.is_paused = session.is_paused, True
        try:
            if engine is not None:
                with self._models.in_use(session):
                    paused = await engine.call(Pause, session=session.id, tier=request.tier)
        except EngineLost:
            pass
        except DjinnError:
            session.is_paused = was_paused and session.is_paused  # it may have been resumed meanwhile
            raise
        log.info("session_paused session=%s tier=%s pages=%d", session.id, request.tier, paused.pages)
        return PauseReply(
            id=call.id, tier=request.tier, pages=paused.pages, nbytes=paused.nbytes, seconds=paused.seconds
        )

    @handles(protocol.ResumeSession)
    async def resume(self, call: ClientCall, request: protocol.ResumeSession) -> None:
        session = self._sessions.lookup(request.session, call.client)
        session.is_paused = False
        session.latency.interrupted()
        self._models.tell(session, Resume(session.id))
        log.info("session_resumed session=%s", session.id)

    @handles(protocol.SetPriority, journal="changes")
    async def set_priority(self, call: ClientCall, request: protocol.SetPriority) -> None:
        session = self._sessions.lookup(request.session, call.client)
        call.client.expect_class(request.priority)
        self._sessions.set_class(session, request.priority)
        self._models.tell(session, SetClass(session.id, session.priority))

    @handles(protocol.GetTokens)
    async def get_tokens(self, call: ClientCall, request: protocol.GetTokens) -> TokenIds:
        session = self._sessions.lookup(request.session, call.client)
        return TokenIds(id=call.id, token_ids=session.tokens)

    @handles(protocol.ListSessions)
    async def list_sessions(self, call: ClientCall, request: protocol.ListSessions) -> Sessions:
        visible = self._sessions.visible(call.client)
        return Sessions(id=call.id, sessions=await self._status.session_infos(visible))
