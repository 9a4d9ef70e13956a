"""From request to final reply: one small coroutine for each kind of request. Errors are raised; the client tells them.

The rule for what reads and then acts: between finding the engine and sending to it nothing is awaited, so that what was
true of session, model and engine is still true.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from djinn_client import protocol
from djinn_client.errors import DjinnError, EngineLost, InvalidRequest, NotPermitted, SessionNotFound, ShuttingDown
from djinn_client.protocol import (
    BudgetReply,
    Done,
    ModelReply,
    PauseReply,
    PlanReply,
    PrefixPublished,
    PrefixWithdrawn,
    Progress,
    SessionOpened,
    Sessions,
    ShareDescribed,
    TokenIds,
    TraceReply,
)
from djinnd.messages import Fork, Loading, Pause, Paused, PublicPrefix, Resume, Signal, Trace, Truncate
from djinnd.server import admission
from djinnd.server.client import Answer, Call, Client
from djinnd.server.export import Exporting
from djinnd.server.journal import Journal
from djinnd.server.kv_sizes import KvSizes
from djinnd.server.models import Model, Models, OnLoading, open_in
from djinnd.server.prefixes import PrefixTable
from djinnd.server.runs import ForwardRun, GenerateRun
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.sharing import Sharing
from djinnd.server.status import Status
from djinnd.server.stopping import Restart
from djinnd.server.supervisor import Supervisor
from djinnd.server.vocabulary import Vocabulary

log = logging.getLogger("djinnd.server")

LONG_TEXT = 2 << 10  # characters; such a prompt takes a millisecond and is tokenised in a thread

_NEW_WORK = (
    protocol.OpenSession,
    protocol.ForkSession,
    protocol.Generate,
    protocol.Forward,
    protocol.ExportSession,
    protocol.ImportSession,
    protocol.PauseSession,
    protocol.PublishPrefix,
    protocol.LoadModel,
    protocol.PlanModel,
    protocol.ShareModel,
    protocol.ShareWeights,
    protocol.SetBudget,
    protocol.GetTrace,
    protocol.Restart,
)
_CHANGES = (
    protocol.OpenSession,
    protocol.ForkSession,
    protocol.ImportSession,
    protocol.Generate,
    protocol.Forward,
    protocol.Truncate,
    protocol.PublishPrefix,
    protocol.WithdrawPrefix,
)


class Handlers:
    def __init__(
        self,
        sessions: SessionTable,
        models: Models,
        sharing: Sharing,
        prefixes: PrefixTable,
        status: Status,
        supervisor: Supervisor,
        journal: Journal,
        restart: Callable[[Restart], None],
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._sharing = sharing
        self._prefixes = prefixes
        self._status = status
        self._supervisor = supervisor
        self._journal = journal
        self._restart_daemon = restart
        self._exporting = Exporting(sessions, models, status, self._model_of)
        self._handlers: dict[type, Callable[[Call, Any], Awaitable[Answer]]] = {
            protocol.Ping: self._ping,
            protocol.OpenSession: self._open,
            protocol.AttachSession: self._attach,
            protocol.ForkSession: self._fork,
            protocol.CloseSession: self._close,
            protocol.Generate: self._generate,
            protocol.Forward: self._forward,
            protocol.Truncate: self._truncate,
            protocol.ExportSession: self._exporting.export,
            protocol.ImportSession: self._import,
            protocol.PauseSession: self._pause,
            protocol.ResumeSession: self._resume,
            protocol.PublishPrefix: self._publish_prefix,
            protocol.ListPrefixes: self._list_prefixes,
            protocol.WithdrawPrefix: self._withdraw_prefix,
            protocol.GetTokens: self._get_tokens,
            protocol.GetStatus: self._get_status,
            protocol.ListSessions: self._list_sessions,
            protocol.ListModels: self._list_models,
            protocol.LoadModel: self._load_model,
            protocol.PlanModel: self._plan_model,
            protocol.UnloadModel: self._unload_model,
            protocol.ShareModel: self._share_model,
            protocol.ShareWeights: self._share_weights,
            protocol.EndShare: self._end_share,
            protocol.SetBudget: self._set_budget,
            protocol.GetTrace: self._trace,
            protocol.Restart: self._restart,
        }

    async def handle(self, call: Call, request: protocol.Request) -> Answer:
        if self._status.is_draining and isinstance(request, _NEW_WORK):
            raise ShuttingDown("the daemon is stopping and takes no new work: try again when it is back")
        if isinstance(request, _CHANGES):  # closing gives room, and goes on
            self._journal.expect_writable()
        return await self._handlers[type(request)](call, request)

    def signal(self, client: Client, signal: protocol.Signal) -> None:
        """It is one-way: nobody is told what is wrong with it."""
        try:
            signal.validate()
            session = self._sessions.lookup(signal.session, client)
        except (InvalidRequest, SessionNotFound) as error:
            log.debug("signal_ignored user=%d reason=%s", client.user, error)
            return
        engine = self._models.engine_of(session)
        if engine is not None:  # else nothing of it is on a device
            engine.send(Signal(session.id, signal.kind == "IO_WAIT", signal.expected_s))

    async def _ping(self, call: Call, request: protocol.Ping) -> Answer:
        return Answer(Done(id=call.id))

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _open(self, call: Call, request: protocol.OpenSession) -> Answer:
        model = self._models.find_open(request.model, call.client)
        self._sessions.expect_room(call.client.user)  # before a model is loaded in vain
        engine = await self._models.ready(model.name, _telling(call))
        self._models.find_open(model.name, call.client)  # who shares it may have ended that meanwhile
        session = self._sessions.open(call.client, model.name, request.priority, shared=model.share is not None)
        open_in(engine, session)
        return Answer(SessionOpened(id=call.id, session=self._status.session_info(session)))

    async def _attach(self, call: Call, request: protocol.AttachSession) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        self._sessions.attach(session, call.client)
        return Answer(SessionOpened(id=call.id, session=(await self._status.session_infos([session]))[0]))

    async def _fork(self, call: Call, request: protocol.ForkSession) -> Answer:
        parent = self._sessions.lookup(request.session, call.client)
        parent.expect_model()
        engine = self._models.find_open(parent.model, call.client).engine
        session = self._sessions.fork(parent, call.client, request.priority)
        if engine is not None:  # else the next one is told the tokens as they are
            engine.send(Fork(session.id, parent.id, session.priority))
        return Answer(SessionOpened(id=call.id, session=self._status.session_info(session)))

    async def _import(self, call: Call, request: protocol.ImportSession) -> Answer:
        window = _descriptor(call) if request.kv is not None or call.fds else None
        try:
            return await self._exporting.import_(call, request, window, _telling(call))
        finally:
            if window is not None:
                os.close(window)

    async def _close(self, call: Call, request: protocol.CloseSession) -> Answer:
        self._sessions.close(self._sessions.lookup(request.session, call.client))
        return Answer(Done(id=call.id))

    async def _truncate(self, call: Call, request: protocol.Truncate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        admission.check_truncate(request.length, len(session.tokens))
        session.cut(request.length)
        engine = self._models.engine_of(session)
        if engine is not None:  # else the next one is told the tokens as they are
            engine.send(Truncate(session.id, request.length))
        return Answer(Done(id=call.id))

    async def _pause(self, call: Call, request: protocol.PauseSession) -> Answer:
        """Whatever runs on it. Where there is no engine, or it is lost meanwhile, the next one opens it paused."""
        admission.check_pause(request)
        session = self._sessions.lookup(request.session, call.client)
        engine, paused = self._models.engine_of(session), Paused(0, pages=0, nbytes=0, seconds=0.0)
        was_paused, session.is_paused = session.is_paused, True
        try:
            if engine is not None:
                paused = await engine.call(Pause, session=session.id, tier=request.tier)
        except EngineLost:
            pass
        except DjinnError:
            session.is_paused = was_paused and session.is_paused  # it may have been resumed in the meantime
            raise
        log.info("session_paused session=%s tier=%s pages=%d", session.id, request.tier, paused.pages)
        return Answer(
            PauseReply(id=call.id, tier=request.tier, pages=paused.pages, nbytes=paused.nbytes, seconds=paused.seconds)
        )

    async def _resume(self, call: Call, request: protocol.ResumeSession) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        session.is_paused = False
        engine = self._models.engine_of(session)
        if engine is not None:
            engine.send(Resume(session.id))
        log.info("session_resumed session=%s", session.id)
        return Answer(Done(id=call.id))

    async def _get_tokens(self, call: Call, request: protocol.GetTokens) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        return Answer(TokenIds(id=call.id, token_ids=session.tokens))

    async def _list_sessions(self, call: Call, request: protocol.ListSessions) -> Answer:
        visible = self._sessions.visible(call.client)
        return Answer(Sessions(id=call.id, sessions=await self._status.session_infos(visible)))

    # --- public prefixes --------------------------------------------------------------------------------------------

    async def _publish_prefix(self, call: Call, request: protocol.PublishPrefix) -> Answer:
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may make a prefix public: other users' sessions share its pages")
        session = self._sessions.lookup(request.session, call.client)
        model = await self._model_of(session)
        session.expect_idle()
        count = admission.public_tokens(request, len(session.tokens), model.described[0].page_size)
        shared = model.share is not None
        prefix = self._prefixes.publish(model.name, call.client.user, session.tokens[:count], shared)
        if model.engine is not None:  # else the next one is told when it has loaded the model
            model.engine.send(PublicPrefix(model.name, prefix.tokens))
        return Answer(PrefixPublished(id=call.id, prefix=prefix.info))

    async def _list_prefixes(self, call: Call, request: protocol.ListPrefixes) -> Answer:
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may list the public prefixes")
        return Answer(protocol.Prefixes(id=call.id, prefixes=[prefix.info for prefix in self._prefixes]))

    async def _withdraw_prefix(self, call: Call, request: protocol.WithdrawPrefix) -> Answer:
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may withdraw a public prefix")
        prefix = self._prefixes.withdraw(request.prefix)
        in_force = any(model.name == prefix.model and model.engine is not None for model in self._models)
        return Answer(PrefixWithdrawn(id=call.id, in_force=in_force))

    # --- work -------------------------------------------------------------------------------------------------------

    async def _generate(self, call: Call, request: protocol.Generate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            info, vocabulary = (await self._model_of(session)).described
            admission.check_generate(request, info, vocabulary.has_text)
            prompt = await _prompt(request, vocabulary, first=not session.tokens)
            admission.check_prompt(prompt, len(session.tokens), info, room=1)
            stop_tokens = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else vocabulary.eos)
            engine = await self._models.ready(session.model)
            session.expect_model()
            run = GenerateRun(call, session, engine, request, prompt, stop_tokens, vocabulary)
            call.client.started(call, run)
            return await run.done

    async def _forward(self, call: Call, request: protocol.Forward) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            admission.check_forward(request, len(session.tokens), (await self._model_of(session)).described[0])
            engine = await self._models.ready(session.model)
            session.expect_model()
            run = ForwardRun(call, session, engine, request)
            call.client.started(call, run)
            return await run.done

    async def _model_of(self, session: SessionRecord) -> Model:
        """Which has been ready. An earlier daemon's session loads it, and finds out whether its tokens still are the
        model's. Raises ModelNotFound, TokenOutOfRange, and what loading raises."""
        session.expect_model()
        if self._models.find(session.model).info is None:
            await self._models.ready(session.model)
        model = self._models.find(session.model)
        if session.is_restored:
            admission.check_tokens(session.tokens, model.described[0])
            session.is_restored = False
        return model

    # --- models -----------------------------------------------------------------------------------------------------

    async def _list_models(self, call: Call, request: protocol.ListModels) -> Answer:
        return Answer(protocol.Models(id=call.id, models=await self._status.model_infos(call.client)))

    async def _load_model(self, call: Call, request: protocol.LoadModel) -> Answer:
        admission.check_load(request)
        kv = KvSizes(request.kv_bytes, request.host_kv_bytes, request.disk_kv_bytes)
        model = self._models.find_open(request.model, call.client)
        if model.state in ("loading", "ready"):
            loaded = f"{model.name} is {'loaded' if model.state == 'ready' else 'being loaded'} already"
            if kv.over(model.kv) != model.kv:
                raise InvalidRequest(f"{loaded}: unload it first, to give it other KV memory")
            if request.placing not in (None, model.placing):
                raise InvalidRequest(f"{loaded}: unload it first, to place its blocks otherwise")
        await self._models.ready(request.model, _telling(call), kv, request.placing)
        model = self._models.find(request.model)
        return Answer(ModelReply(id=call.id, model=self._status.model_info(model)))

    async def _plan_model(self, call: Call, request: protocol.PlanModel) -> Answer:
        admission.check_plan(request)
        self._models.find_visible(request.model, call.client)
        plan = await self._models.plan(request.model, request.memory_bytes, request.kv_bytes, request.placing)
        return Answer(PlanReply(id=call.id, plan=plan))

    async def _unload_model(self, call: Call, request: protocol.UnloadModel) -> Answer:
        model = self._models.find_visible(request.model, call.client)
        if model.share is not None and not model.share.is_of(call.client):
            raise NotPermitted(f"{model.name} is another user's: only that user, or an administrator, may unload it")
        sessions = self._sessions.of_model(model.name)
        if sessions and not request.force:
            raise InvalidRequest(f"{len(sessions)} sessions use {model.name}: close them, or unload it with force")
        if not call.client.is_admin and any(session.user != call.client.user for session in sessions):
            raise NotPermitted(f"other users have sessions of {model.name}: only an administrator may close them")
        for session in sessions:
            self._sessions.close(session)
        if model.share is not None:
            await self._sharing.withdraw(model.share)
        else:
            await self._models.unload(model)
        return Answer(Done(id=call.id))

    async def _share_model(self, call: Call, request: protocol.ShareModel) -> Answer:
        admission.check_share(request)
        self._sharing.check(call.client, request)
        share, image = await self._sharing.describe(call.client, request, _descriptor(call))
        return Answer(ShareDescribed(id=call.id, share=share.id, model=share.model, image=image))

    async def _share_weights(self, call: Call, request: protocol.ShareWeights) -> Answer:
        fd = _descriptor(call)
        try:
            model = await self._sharing.accept(call.client, request.share, fd, _telling(call))
        finally:
            os.close(fd)
        return Answer(ModelReply(id=call.id, model=self._status.model_info(model)))

    async def _end_share(self, call: Call, request: protocol.EndShare) -> Answer:
        await self._sharing.end(call.client, request.share)
        return Answer(Done(id=call.id))

    # --- the daemon -------------------------------------------------------------------------------------------------

    async def _set_budget(self, call: Call, request: protocol.SetBudget) -> Answer:
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may change the budget of device memory")
        admission.check_budget(request.memory_bytes)
        changed = await self._supervisor.set_budget(request.memory_bytes)
        return Answer(
            BudgetReply(
                id=call.id,
                budget_bytes=changed.budget_bytes,
                used_bytes=changed.used_bytes,
                seconds=changed.seconds,
                models=[self._status.model_info(model) for model in self._models if model.engine is not None],
            )
        )

    async def _trace(self, call: Call, request: protocol.GetTrace) -> Answer:
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may trace the device: it shows what all users do")
        admission.check_trace(request)
        engine = await self._supervisor.engine()
        traced = await engine.call(Trace, steps=request.steps, seconds=request.seconds)
        return Answer(TraceReply(id=call.id, device=engine.ready.result().device, spans=traced.spans))

    async def _restart(self, call: Call, request: protocol.Restart) -> Answer:
        """Answered before the daemon drains, and told before the connection is closed."""
        if not call.client.is_admin:
            raise NotPermitted("only an administrator may restart the daemon")
        self._restart_daemon("warm" if request.warm else "cold")
        return Answer(Done(id=call.id))

    async def _get_status(self, call: Call, request: protocol.GetStatus) -> Answer:
        if request.check and not call.client.is_admin:
            raise NotPermitted("only an administrator may have the daemon check itself")
        return Answer(await self._status.reply(call.id, request.check, call.client))


def _descriptor(call: Call) -> int:
    """The one that came with the request; the caller's now."""
    if len(call.fds) != 1:
        raise InvalidRequest(f"this request brings one descriptor; {len(call.fds)} came")
    return call.fds.pop()


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
