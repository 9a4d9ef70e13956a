"""Explains why a session runs or waits. The engine answers if it has the session's call, otherwise the server does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec.structs import replace

from djinn_client.errors import EngineLost, ModelNotFound, SessionLost
from djinn_client.protocol import ExplainSession, WhyReply
from djinn_client.protocol.fields.scheduling import Why
from djinnd.messages import Explain, Explained
from djinnd.server.engines.supervisor import Supervisor
from djinnd.server.loading.models import ModelTable, ServedModel
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.request_handler import handles

Figures = dict[str, int | float | str]


@dataclass(eq=False)
class ExplainRequests:
    _sessions: SessionTable
    _models: ModelTable
    _supervisor: Supervisor
    _status: Status

    @handles(ExplainSession)
    async def explain(self, call: ClientCall, request: ExplainSession) -> WhyReply:
        session = self._sessions.lookup(request.session, call.client)
        while (why := self._own_answer(session)) is None:
            engine = self._models.engine_of(session)
            assert engine is not None
            try:
                why = self._visible_to(call.client, await engine.call(Explain, session=session.id))
                break
            except EngineLost:
                continue  # the model now has no engine
        return WhyReply(id=call.id, why=replace(why, user_name=self._status.name_of(session.user)))

    def _visible_to(self, client: ConnectedClient, told: Explained) -> Why:
        """Adapts the engine's answer to the client: sessions of other users are only counted, except for
        administrators."""
        visible = {session.id for session in self._sessions.visible(client)}
        ahead = [session for session in told.ahead if session in visible]
        others = len(told.ahead) - len(ahead)
        return Why(state=told.state, reason=told.reason, figures=told.figures, ahead=ahead, others_ahead=others)

    def _own_answer(self, session: SessionRecord) -> Why | None:
        """The server's own answer; None if the engine has the session's call."""
        try:
            session.expect_model()
        except (SessionLost, ModelNotFound) as error:
            return self._why(session, error.message, {})
        model = self._models.model_of(session)
        if session.grace is not None and session.call is None and not session.is_paused:
            return self._detached(session)
        if model is None or model.engine is None:
            return self._without_engine(session, model)
        if session.call is not None and session.call.run is None:
            told = "its call is still in the server, which tokenises the prompt"
            return self._why(session, told, {})
        return None

    def _detached(self, session: SessionRecord) -> Why:
        assert session.grace is not None  # set, as no client is attached to the session
        left = max(0.0, session.grace.when() - asyncio.get_running_loop().time())
        told = f"no client is attached to it: it is closed in {left:,.0f} s unless one comes"
        return self._why(session, told, {"closed_in_s": round(left, 3)})

    def _without_engine(self, session: SessionRecord, model: ServedModel | None) -> Why:
        where, figures = self._model_state(model)
        if session.is_paused:
            told = f"it is paused until it is resumed, and {where}"
        elif session.call is None:
            told = f"no call runs on it, and {where}"
        else:
            told = f"its call waits: {where}"
        return self._why(session, told, figures)

    def _model_state(self, model: ServedModel | None) -> tuple[str, Figures]:
        """The state of a model that no engine has, as a phrase and figures."""
        if model is not None and model.state == "asleep":
            return "its model is asleep and has freed its device memory: the next call loads it", {}
        if model is None or model.state != "loading":
            return "its model is not loaded: the next call loads it", {}
        if self._supervisor.state != "ready":
            state = self._supervisor.state
            return f"there is no engine for its model: the engine is {state}", {"engine": state}
        progress = model.progress
        if progress is None:
            return "its model is about to be loaded", {}
        figures: Figures = {"stage": progress.stage, "done_bytes": progress.done, "total_bytes": progress.total}
        much = f", {progress.done:,} of {progress.total:,} bytes" if progress.total else ""
        return f"its model is being loaded: {progress.stage}{much}", figures

    def _why(self, session: SessionRecord, reason: str, figures: Figures) -> Why:
        return Why(state=self._status.session_info(session).state, reason=reason, figures=figures)
