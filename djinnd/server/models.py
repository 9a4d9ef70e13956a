"""The models, and their way onto an engine.

    available ──load──► loading ──► ready ──engine lost──► loading …
        ▲                  └─error─► failed ──load──► loading …
        └──────── unload ────────────┴──┘

Whoever needs a model that is not ready joins its one load and is told how it goes. A model that is ready on an engine
has all its sessions open there: that is how sessions come back after the loss of an engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from djinn_client.errors import DjinnError, EngineLost, InvalidRequest, OutOfMemory
from djinn_client.protocol import ModelInfo
from djinnd import config
from djinnd.messages import ArenaFilled, ArenaReady, ArenaRefused, Load, Loaded, Loading, NeedArena, Open, Unload
from djinnd.server.arena import Arena
from djinnd.server.checkpoints import find_checkpoint, known_models, model_named
from djinnd.server.engine_client import EngineClient
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.vocabulary import Vocabulary

log = logging.getLogger("djinnd.server")

ModelState = Literal["available", "loading", "ready", "failed"]
OnLoading = Callable[[Loading], None]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Model:
    """`info` and `vocabulary` are set when it is ready for the first time, and stay."""

    name: str
    source: config.Model
    kv_bytes: int  # 0: the engine decides
    state: ModelState = "available"
    error: str = ""
    info: ModelInfo | None = None
    vocabulary: Vocabulary | None = None
    engine: EngineClient | None = None  # while it is ready
    changing: asyncio.Task[None] | None = None  # its load or its unload
    progress: Loading | None = None
    listeners: list[OnLoading] = field(default_factory=list)

    @property
    def described(self) -> tuple[ModelInfo, Vocabulary]:
        """Of a model that has been ready, as every model with a session has."""
        assert self.info is not None and self.vocabulary is not None
        return self.info, self.vocabulary


class Models:
    """Owns the models' arena. It is the Owner of the engines: what they say about loading comes here."""

    def __init__(
        self,
        configured: Mapping[str, config.Model],
        sessions: SessionTable,
        arena: Arena,
        engine_for: Callable[[str], Awaitable[EngineClient]],
    ) -> None:
        self._known = known_models(configured)
        self._models = {name: Model(name, source, source.kv) for name, source in self._known.items()}
        self._sessions = sessions
        self._arena = arena
        self._arena_lock = asyncio.Lock()
        self._download_lock = asyncio.Lock()  # one at a time: they hold a thread each, for long
        self._engine_for = engine_for
        self._grants: set[asyncio.Task[None]] = set()
        self._closing = False

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def find(self, name: str) -> Model:
        """Raises ModelNotFound. A folder or a hub id becomes a known model when somebody loads it."""
        name = os.path.normpath(name) if name.startswith("/") else name
        if name in self._models:
            return self._models[name]
        source = model_named(name, self._known)
        return Model(name, source, source.kv)

    def preload(self) -> None:
        for model in self:
            if model.source.preload:
                self._start_load(model)

    async def ready(self, name: str, on_loading: OnLoading = lambda _: None, kv_bytes: int = 0) -> EngineClient:
        """The engine that has the model, which is loaded if need be: `kv_bytes` for its pages, 0 as configured. Raises
        ModelNotFound, and what loading raises.

        The engine lives, and has the model, until the caller waits for something else.
        """
        while (model := self.find(name)).engine is None:
            if model.changing is None:
                model.kv_bytes = kv_bytes or model.kv_bytes
                self._start_load(model)
            await _join(model, on_loading)
        return model.engine

    async def unload(self, model: Model) -> None:
        """Of a model without sessions. Raises InvalidRequest while it is being loaded."""
        if model.changing is not None:
            raise InvalidRequest(f"{model.name} is being loaded: wait for it")
        assert not self._sessions.of_model(model.name)
        engine, model.engine, model.state = model.engine, None, "available"
        model.changing = asyncio.create_task(self._unload(model, engine))
        await _join(model, lambda _: None)

    def stop(self) -> None:
        """Nothing is loaded any more."""
        self._closing = True
        for model in self:
            if model.changing is not None:
                model.changing.cancel()

    async def close(self) -> None:
        """After `stop`, when the engine is gone. Returns when the arena is empty."""
        changes = [model.changing for model in self if model.changing is not None]
        await asyncio.gather(*changes, *self._grants, return_exceptions=True)
        await self._in_arena(self._arena.close)

    # --- what engines say: see supervisor.Owner ---------------------------------------------------------------------

    def engine_lost(self) -> None:
        """What was ready is loaded again as soon as there is an engine; its sessions follow."""
        for model in self:
            if model.engine is not None:
                model.engine = None
                if not self._closing:
                    self._start_load(model)

    def loading(self, message: Loading) -> None:
        model = self._models.get(message.model)
        if model is not None:
            model.progress = message
            for listener in model.listeners:
                listener(message)

    def need_arena(self, engine: EngineClient, message: NeedArena) -> None:
        task = asyncio.create_task(self._grant(engine, message))
        self._grants.add(task)
        task.add_done_callback(self._grants.discard)

    def arena_filled(self, message: ArenaFilled) -> None:
        self._arena.complete(message.model)

    async def _grant(self, engine: EngineClient, message: NeedArena) -> None:
        try:
            name, offset, complete = await self._in_arena(
                self._arena.grant, message.model, message.nbytes, message.fingerprint
            )
        except OutOfMemory as error:
            engine.send(ArenaRefused(message.request, error.message, error.data))
        except OSError as error:
            engine.send(ArenaRefused(message.request, f"no shared memory for {message.model}: {error}"))
        else:
            engine.send(ArenaReady(message.request, name, offset, complete))

    # --- changes of state -------------------------------------------------------------------------------------------

    def _start_load(self, model: Model) -> None:
        self._models[model.name] = model
        model.state, model.error = "loading", ""
        model.changing = asyncio.create_task(self._load(model))
        model.changing.add_done_callback(_seen)

    async def _load(self, model: Model) -> None:
        try:
            folder = await self._checkpoint(model)
            vocabulary = await asyncio.to_thread(Vocabulary.read, model.name, folder)
            engine = await self._engine_for(model.name)
            loaded: Loaded = await engine.call(
                Load,
                model=model.name,
                path=str(folder),
                kv_bytes=int(model.kv_bytes),
                dtype=model.source.dtype,
                max_context=model.source.max_context,
            )
        except Exception as error:
            await self._load_failed(model, error)
            raise
        finally:
            model.changing = model.progress = None
        model.info, model.vocabulary, model.engine, model.state = loaded.model, vocabulary, engine, "ready"
        for session in self._sessions.of_model(model.name):
            open_in(engine, session)
        log.info("model_ready model=%s bytes=%d", model.name, loaded.model.weight_bytes)

    async def _load_failed(self, model: Model, error: Exception) -> None:
        message = error.message if isinstance(error, DjinnError) else repr(error)
        log.error("model_failed model=%s error=%s", model.name, message)
        model.state, model.error = "failed", message
        if not isinstance(error, EngineLost) or not self._arena.is_complete(model.name):
            await self._in_arena(self._arena.remove, model.name)
        self._forget_unless_used(model)

    async def _unload(self, model: Model, engine: EngineClient | None) -> None:
        try:
            if engine is not None:
                with suppress(EngineLost):  # then it is unloaded, too
                    await engine.call(Unload, model=model.name)
            await self._in_arena(self._arena.remove, model.name)
        finally:
            model.changing = None
        self._forget_unless_used(model)
        log.info("model_unloaded model=%s", model.name)

    def _forget_unless_used(self, model: Model) -> None:
        """What callers name themselves is known only as long as it is of use."""
        if model.name not in self._known and not self._sessions.of_model(model.name):
            self._models.pop(model.name, None)

    async def _checkpoint(self, model: Model) -> Path:
        async with self._download_lock:
            return await asyncio.to_thread(find_checkpoint, model.name, model.source.path)

    async def _in_arena(self, act: Callable[..., T], *arguments: Any) -> T:
        """In a thread, because giving and taking gigabytes takes seconds; one at a time."""
        async with self._arena_lock:
            return await asyncio.to_thread(act, *arguments)


def open_in(engine: EngineClient, session: SessionRecord) -> None:
    engine.send(Open(session.id, session.model, session.user, session.priority, session.tokens))


async def _join(model: Model, on_loading: OnLoading) -> None:
    """Waits for the change that is under way, which goes on also when the caller goes."""
    assert model.changing is not None
    if model.progress is not None:
        on_loading(model.progress)
    model.listeners.append(on_loading)
    try:
        await asyncio.shield(model.changing)
    finally:
        model.listeners.remove(on_loading)


def _seen(change: asyncio.Task[None]) -> None:
    if not change.cancelled():
        change.exception()  # nobody may be waiting for it
