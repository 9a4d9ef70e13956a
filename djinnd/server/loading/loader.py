"""Loads a model onto an engine, puts it to sleep, and unloads it.

Each change is a task, `ServedModel.changing`. A model has at most one at a time, which continues if its callers are
cancelled. The states are drawn in models.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path

from djinn_client.errors import DjinnError, EngineLost, InvalidRequest, OutOfMemory, QuotaExceeded, Retry
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from djinnd.messages import Load, Loaded, Open, Plan, PublicPrefix, Unload
from djinnd.server.arenas.arena import Arena
from djinnd.server.checkpoints.folders import Folders
from djinnd.server.checkpoints.inspection import Inspector
from djinnd.server.engines.blame import MOST_DEATHS
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.arena_requests import ArenaRequests
from djinnd.server.loading.drafts import DraftModels, DraftMoved
from djinnd.server.loading.load_deaths import LoadDeaths
from djinnd.server.loading.user_deaths import UserDeaths
from djinnd.server.models.keep_alive import KeepAlive
from djinnd.server.models.model import ServedModel
from djinnd.server.models.open_files import duplicates
from djinnd.server.models.text import ModelText
from djinnd.server.sessions.prefixes import PrefixTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.text.texts import Texts

log = logging.getLogger("djinnd.server")


@dataclass(eq=False)
class ModelLifecycle:
    """Changes the state of models. `models` iterates over all known models. `gone` is called with a model that has been
    unloaded or could not be loaded. `page_folder` holds the pages that engines keep on disk; it outlives the daemon."""

    _models: Iterable[ServedModel]
    _sessions: SessionTable
    _prefixes: PrefixTable
    _arena: Arena
    _arena_requests: ArenaRequests
    _engine: Callable[[], Awaitable[EngineClient]]
    next_engine: InitVar[Callable[[], Awaitable[EngineClient]]]
    _page_folder: Path
    _folders: Folders
    _texts: Texts
    _inspector: Inspector
    _user_deaths: UserDeaths
    _gone: Callable[[ServedModel], None]

    def __post_init__(self, next_engine: Callable[[], Awaitable[EngineClient]]) -> None:
        self.drafts = DraftModels(self._models, self.load)
        self.keep_alive = KeepAlive(self._sessions, self.sleep, self.drafts.is_needed)
        self.deaths = LoadDeaths(self._models, next_engine)

    async def plan(self, model: ServedModel, memory_bytes: int, kv_bytes: int, placing: Placing | None) -> ModelPlan:
        """Computes what loading the model would take. 0 and None stand for the configured values and the device's own
        budget. Raises ModelNotFound, and the engine's refusals."""
        try:
            files = await self._folders.files_of(model)
            engine = await self._engine()
            fields = model.load_fields(files, model.placed(placing))
            fields |= {"kv_bytes": kv_bytes or model.kv.device, "memory_bytes": memory_bytes}
            if self._is_inspected(model):
                return await self._inspector.plan(model.opener, engine, files, **fields)
            planned = await engine.call(Plan, duplicates(files), **fields)
            return planned.plan
        finally:
            if model.state == "available" and model.changing is None:
                self._gone(model)

    def load(self, model: ServedModel) -> None:
        wakes = model.state == "asleep"
        model.state, model.error = "loading", ""
        model.changing = asyncio.create_task(self._load(model, wakes))
        model.changing.add_done_callback(mark_error_seen)

    def sleep(self, model: ServedModel) -> None:
        """Makes the engine free all device memory of a ready model without calls. Its sessions and its objects in the
        arena stay. Its pages move from the device to the host, as far as the host has room."""
        assert model.engine is not None and model.changing is None
        engine, model.engine, model.state = model.engine, None, "asleep"
        self._arena.rest(model.name)
        model.changing = asyncio.create_task(self._fall_asleep(model, engine))
        model.changing.add_done_callback(mark_error_seen)

    async def unload(self, model: ServedModel) -> None:
        """Unloads a model that has no sessions. Raises InvalidRequest while it is being loaded, or guesses for another
        model."""
        self.drafts.expect_unused(model)
        if model.changing is not None and model.state == "asleep":
            await model.join()
        if model.changing is not None:
            raise InvalidRequest(f"{model.name} is being loaded: wait for it")
        assert not self._sessions.of_model(model.name)
        self.keep_alive.end(model)
        engine, model.engine, model.state = model.engine, None, "available"
        model.changing = asyncio.create_task(self._unload(model, engine))
        await model.join()

    def stop(self) -> None:
        self._folders.hub.stop()
        for model in self._models:
            self.keep_alive.end(model)
            if model.changing is not None:
                model.changing.cancel()

    async def close(self) -> None:
        """After `stop`: returns when no change is under way."""
        changes = [model.changing for model in self._models if model.changing is not None]
        await asyncio.gather(*changes, self._folders.hub.close(), return_exceptions=True)

    # --- load ---------------------------------------------------------------------------------------------------------

    async def _load(self, model: ServedModel, wakes: bool) -> None:
        """Loads the model and opens its sessions. Nothing is awaited between the engine's reply and opening the
        sessions: each caller that finds the model ready finds its sessions open."""
        try:
            self._expect_load(model)
            files = await self._folders.files_of(model)
            configured = model.source if model.is_configured else None
            text = await self._texts.open(model.opener, model.name, files, configured, model.template)
            await self._wait_for_leaving()
            if model.kv.host == 0:
                await self._arena_requests.remove(model.name, "pages")
            engine, loaded = await self._loaded(model, files, text)
        except Exception as error:
            await self._load_failed(model, error, wakes)
            raise
        finally:
            model.changing = model.progress = None
        model.info, model.text, model.engine, model.state = loaded.model, text, engine, "ready"
        model.adapters.clear()  # the engine has none of them now
        model.used = time.monotonic()
        self.keep_alive.begin(model)
        for prefix in self._prefixes.of_model(model.name, shared=model.share is not None):
            engine.send(PublicPrefix(model.name, prefix.tokens))
        for session in self._sessions.of_model(model.name):
            open_in(engine, session)
        log.info("model_ready model=%s bytes=%d", model.name, loaded.model.weight_bytes)

    async def _loaded(self, model: ServedModel, files: ModelFiles, text: ModelText) -> tuple[EngineClient, Loaded]:
        """Loads the model's draft, if it has one, and the model on the same engine."""
        check, load = partial(self._check, model, files), partial(self._load_on, model, files)
        while True:
            await self.drafts.ready(model, text)
            with suppress(DraftMoved):
                return await self.deaths.on_an_engine(model, check, load)

    def _expect_load(self, model: ServedModel) -> None:
        """Raises QuotaExceeded if too many engines have died over models of the model's owner."""
        if not model.is_configured and model.owner is not None:
            self._user_deaths.expect_load(model.owner, time.monotonic())

    def _is_inspected(self, model: ServedModel) -> bool:
        return self._inspector.is_there and not model.is_configured

    async def _check(self, model: ServedModel, files: ModelFiles, engine: EngineClient) -> None:
        self._expect_load(model)
        if self._is_inspected(model) and model.passed is not files:
            await self._inspector.check(model.opener, engine, files, **model.load_fields(files, model.placing))
            model.passed = files

    async def _load_on(self, model: ServedModel, files: ModelFiles, engine: EngineClient) -> Loaded:
        self.drafts.expect_on(engine, model)
        fields = model.load_fields(files, model.placing) | model.kv.fields
        fields |= {"disk_folder": self._disk_folder(model), "is_draft": self.drafts.is_draft(model)}
        try:
            loaded = await engine.call(Load, duplicates(files), **fields)
        except EngineLost:
            await self._arena_requests.remove_incomplete(model.name)
            raise
        return loaded

    async def _wait_for_leaving(self) -> None:
        """Returns when models that sleep or unload have given back their device memory."""
        leaving = [model.changing for model in self._models if model.changing is not None and model.is_leaving]
        if leaving:
            await asyncio.wait(leaving)

    async def _load_failed(self, model: ServedModel, error: Exception, wakes: bool) -> None:
        """Sets the state after a failed load. A model that was asleep stays so if it only lacked memory, an engine, or
        its owner's quota."""
        message = error.message if isinstance(error, DjinnError) else repr(error)
        log.error("model_failed model=%s error=%s", model.name, message)
        sleeps_on = wakes and isinstance(error, OutOfMemory | EngineLost | QuotaExceeded)
        is_set_aside = model.load_deaths >= MOST_DEATHS
        model.state = "asleep" if sleeps_on else "set aside" if is_set_aside else "failed"
        model.error, model.failed_at = message, time.monotonic()
        keep = sleeps_on or isinstance(error, EngineLost)
        await (self._arena_requests.remove_incomplete(model.name) if keep else self._arena_requests.remove(model.name))
        if not isinstance(error, OutOfMemory | QuotaExceeded | Retry):
            self._folders.close(model)  # they may be the fault
        if sleeps_on:
            self._arena.rest(model.name)
        elif not is_set_aside:  # a model that is set aside stays known, with the reason
            self._gone(model)

    def _disk_folder(self, model: ServedModel) -> str:
        """Folder for pages on disk. None for a model that a client shares: later weights of that name may differ, which
        could not be detected."""
        return str(self._page_folder) if model.share is None else ""

    # --- off the engine -----------------------------------------------------------------------------------------------

    async def _fall_asleep(self, model: ServedModel, engine: EngineClient) -> None:
        log.info("model_falls_asleep model=%s keep_alive=%g", model.name, model.keep_alive)
        try:
            with suppress(EngineLost):  # then its memory is free, too
                await engine.call(Unload, model=model.name, keep_pages=True)
        finally:
            model.changing = None
        log.info("model_asleep model=%s", model.name)

    async def _unload(self, model: ServedModel, engine: EngineClient | None) -> None:
        try:
            if engine is not None:
                with suppress(EngineLost):  # then it is unloaded, too
                    await engine.call(Unload, model=model.name)
            await self._arena_requests.remove(model.name)
        finally:
            model.changing = None
        if model.text is not None:
            model.text.close()
        self._folders.close(model)
        self._gone(model)
        log.info("model_unloaded model=%s", model.name)


def open_in(engine: EngineClient, session: SessionRecord) -> None:
    """Opens a session on an engine."""
    engine.set_tenants([session.tenant.limits])
    engine.send(
        Open(
            session.id,
            session.model,
            session.user,
            session.priority,
            session.tokens,
            paused=session.is_paused,
            edits=session.edits.edits,
            due_from=session.due_from,
            adapter=b"" if session.adapter is None else session.adapter.identity,
        )
    )


def mark_error_seen(task: asyncio.Task[None]) -> None:
    """Reads the error of an ended task, so that asyncio does not log it if all callers were cancelled."""
    if not task.cancelled():
        task.exception()
