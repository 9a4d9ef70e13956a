"""From request to final reply: one small coroutine for each kind of request. Errors are raised; the client tells them.

The rule for what reads and then acts: between finding the engine and sending to it nothing is awaited, so that what was
true of session, model and engine is still true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, NotPermitted, ShuttingDown
from djinn_client.protocol import Done, ModelReply, Progress, SessionOpened, Sessions, TokenIds
from djinnd.messages import Loading, Truncate
from djinnd.server import admission
from djinnd.server.client import Answer, Call
from djinnd.server.models import Models, OnLoading, open_in
from djinnd.server.runs import ForwardRun, GenerateRun
from djinnd.server.sessions import SessionTable
from djinnd.server.status import Status
from djinnd.server.vocabulary import Vocabulary

LONG_TEXT = 2 << 10  # characters; such a prompt takes a millisecond and is tokenised in a thread

_NEW_WORK = (protocol.OpenSession, protocol.Generate, protocol.Forward, protocol.LoadModel)


class Handlers:
    def __init__(self, sessions: SessionTable, models: Models, status: Status) -> None:
        self._sessions = sessions
        self._models = models
        self._status = status
        self._handlers: dict[type, Callable[[Call, Any], Awaitable[Answer]]] = {
            protocol.Ping: self._ping,
            protocol.OpenSession: self._open,
            protocol.AttachSession: self._attach,
            protocol.CloseSession: self._close,
            protocol.Generate: self._generate,
            protocol.Forward: self._forward,
            protocol.Truncate: self._truncate,
            protocol.GetTokens: self._get_tokens,
            protocol.GetStatus: self._get_status,
            protocol.ListSessions: self._list_sessions,
            protocol.ListModels: self._list_models,
            protocol.LoadModel: self._load_model,
            protocol.UnloadModel: self._unload_model,
        }

    async def handle(self, call: Call, request: protocol.Request) -> Answer:
        if self._status.is_draining and isinstance(request, _NEW_WORK):
            raise ShuttingDown("the daemon is stopping and takes no new work: try again when it is back")
        return await self._handlers[type(request)](call, request)

    async def _ping(self, call: Call, request: protocol.Ping) -> Answer:
        return Answer(Done(id=call.id))

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _open(self, call: Call, request: protocol.OpenSession) -> Answer:
        model = self._models.find(request.model)
        self._sessions.expect_room(call.client.user)  # before a model is loaded in vain
        engine = await self._models.ready(model.name, _telling(call))
        session = self._sessions.open(call.client, model.name, request.priority)
        open_in(engine, session)
        return Answer(SessionOpened(id=call.id, session=self._status.session_info(session)))

    async def _attach(self, call: Call, request: protocol.AttachSession) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        self._sessions.attach(session, call.client)
        return Answer(SessionOpened(id=call.id, session=(await self._status.session_infos([session]))[0]))

    async def _close(self, call: Call, request: protocol.CloseSession) -> Answer:
        self._sessions.close(self._sessions.lookup(request.session, call.client))
        return Answer(Done(id=call.id))

    async def _truncate(self, call: Call, request: protocol.Truncate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        admission.check_truncate(request.length, len(session.tokens))
        del session.tokens[request.length :]
        engine = self._models.find(session.model).engine
        if engine is not None:  # else the next one is told the tokens as they are
            engine.send(Truncate(session.id, request.length))
        return Answer(Done(id=call.id))

    async def _get_tokens(self, call: Call, request: protocol.GetTokens) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        return Answer(TokenIds(id=call.id, token_ids=session.tokens))

    async def _list_sessions(self, call: Call, request: protocol.ListSessions) -> Answer:
        visible = self._sessions.visible(call.client)
        return Answer(Sessions(id=call.id, sessions=await self._status.session_infos(visible)))

    # --- work -------------------------------------------------------------------------------------------------------

    async def _generate(self, call: Call, request: protocol.Generate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            model = self._models.find(session.model)
            info, vocabulary = model.described
            admission.check_generate(request, info, vocabulary.has_text)
            prompt = await _prompt(request, vocabulary, first=not session.tokens)
            admission.check_prompt(prompt, len(session.tokens), info, room=1)
            stop_tokens = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else vocabulary.eos)
            engine = await self._models.ready(session.model)
            run = GenerateRun(call, session, engine, request, prompt, stop_tokens, vocabulary)
            call.client.started(call, run)
            return await run.done

    async def _forward(self, call: Call, request: protocol.Forward) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            model = self._models.find(session.model)
            admission.check_forward(request, len(session.tokens), model.described[0])
            engine = await self._models.ready(session.model)
            run = ForwardRun(call, session, engine, request)
            call.client.started(call, run)
            return await run.done

    # --- models -----------------------------------------------------------------------------------------------------

    async def _list_models(self, call: Call, request: protocol.ListModels) -> Answer:
        return Answer(protocol.Models(id=call.id, models=await self._status.model_infos()))

    async def _load_model(self, call: Call, request: protocol.LoadModel) -> Answer:
        if request.kv_bytes < 0:
            raise InvalidRequest(f"kv_bytes is {request.kv_bytes}; it must be 0 (as the daemon sees fit) or a size")
        model = self._models.find(request.model)
        if model.engine is not None and request.kv_bytes not in (0, model.kv_bytes):
            raise InvalidRequest(f"{model.name} is loaded already: unload it first, to give it other KV memory")
        await self._models.ready(request.model, _telling(call), request.kv_bytes)
        model = self._models.find(request.model)
        return Answer(ModelReply(id=call.id, model=self._status.model_info(model)))

    async def _unload_model(self, call: Call, request: protocol.UnloadModel) -> Answer:
        model = self._models.find(request.model)
        sessions = self._sessions.of_model(model.name)
        if sessions and not request.force:
            raise InvalidRequest(f"{len(sessions)} sessions use {model.name}: close them, or unload it with force")
        if not call.client.is_admin and any(session.user != call.client.user for session in sessions):
            raise NotPermitted(f"other users have sessions of {model.name}: only an administrator may close them")
        for session in sessions:
            self._sessions.close(session)
        await self._models.unload(model)
        return Answer(Done(id=call.id))

    async def _get_status(self, call: Call, request: protocol.GetStatus) -> Answer:
        if request.check and not call.client.is_admin:
            raise NotPermitted("only an administrator may have the daemon check itself")
        return Answer(await self._status.reply(call.id, request.check))


def _telling(call: Call) -> OnLoading:
    def tell(loading: Loading) -> None:
        done, total = loading.done, loading.total
        call.send(Progress(id=call.id, model=loading.model, stage=loading.stage, done=done, total=total))

    return tell


async def _prompt(request: protocol.Generate, vocabulary: Vocabulary, first: bool) -> list[int]:
    if request.text is None:
        return request.token_ids or []
    if len(request.text) > LONG_TEXT:
        return await asyncio.to_thread(vocabulary.encode, request.text, first)
    return vocabulary.encode(request.text, first)
