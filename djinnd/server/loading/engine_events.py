"""Receives engines' messages about models: losses, progress, and requests for shared memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from djinn_client.protocol import ModelInfo
from djinnd.messages import ArenaFilled, FromEngine, GrammarTime, HostReleased, Loading, NeedArena, Recomputed
from djinnd.server.engines.blame import Suspect
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.arena_requests import ArenaRequests
from djinnd.server.loading.user_deaths import UserDeaths
from djinnd.server.models.model import ServedModel
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.text.texts import Texts

log = logging.getLogger("djinnd.server")


@dataclass(eq=False)
class ModelEvents:
    """The ModelOwner of the supervisor. `load_again` loads a model after the loss of its engine."""

    _models: Mapping[str, ServedModel]
    _sessions: SessionTable
    _arena_requests: ArenaRequests
    _texts: Texts
    _user_deaths: UserDeaths
    _is_admin: Callable[[int], bool]
    _load_again: Callable[[ServedModel], None]

    def engine_lost(self, suspects: Collection[Suspect]) -> bool:
        """Loads each model that was ready again on the next engine; its sessions follow. Returns True if models of one
        user are to blame for the engine's death."""
        user = self._blamed_user(suspects)
        if user is not None:
            self._user_deaths.count(user, time.monotonic())
            log.error("user_killed_engine user=%d models=%s", user, sorted({each.model for each in suspects}))
        for model in list(self._models.values()):
            if model.engine is not None:
                for session in self._sessions.of_model(model.name):
                    session.is_lost = bool(session.salt)
                model.engine = None
                self._load_again(model)
        return user is not None

    def _blamed_user(self, suspects: Collection[Suspect]) -> int | None:
        """The user to whom the death is charged. None if only configured models, several users or an administrator are
        to blame."""
        models = [self._models.get(each.model) for each in suspects]
        if all(model is None or model.is_configured for model in models):
            return None
        loaders = [None if model is None or model.is_configured else model.owner for model in models]
        users = {loader if each.user is None else each.user for each, loader in zip(suspects, loaders, strict=True)}
        user = users.pop()
        return None if users or user is None or self._is_admin(user) else user

    def described(self, infos: Iterable[ModelInfo]) -> None:
        """Stores the new descriptions of models after the engine has moved their blocks."""
        for info in infos:
            model = self._models.get(info.name)
            if model is not None and model.engine is not None:
                model.info = info

    def received(self, engine: EngineClient, message: FromEngine) -> None:
        match message:
            case Loading(model=name):
                self._loading(name, message)
            case NeedArena(model=name):
                self._arena_requests.need(engine, message, self._models.get(name))
            case ArenaFilled():
                self._arena_requests.filled(message)
            case HostReleased():
                self._arena_requests.released(message)
            case Recomputed(tokens=tokens_by_tenant):
                for tenant, tokens in tokens_by_tenant.items():
                    self._sessions.recomputed(tenant, tokens)
            case GrammarTime(seconds=seconds_by_tenant):
                for tenant, seconds in seconds_by_tenant.items():
                    self._texts.grammar_time.charge(tenant, seconds)

    def _loading(self, name: str, message: Loading) -> None:
        model = self._models.get(name)
        if model is not None:
            model.progress = message
            for listener in model.listeners:
                listener(message)
