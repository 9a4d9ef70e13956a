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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from djinn_client.errors import DjinnError, EngineLost, InvalidRequest, ModelNotFound, OutOfMemory
from djinn_client.placing import ModelPlan, Placing
from djinn_client.protocol import ModelInfo
from djinnd import config
from djinnd.messages import (
    ArenaFilled,
    ArenaReady,
    ArenaRefused,
    HostReleased,
    Load,
    Loaded,
    Loading,
    NeedArena,
    Open,
    Plan,
    Planned,
    PublicPrefix,
    Unload,
)
from djinnd.server.arena import Arena
from djinnd.server.checkpoints import find_checkpoint, known_models, model_named
from djinnd.server.client import Client
from djinnd.server.engine_client import EngineClient
from djinnd.server.kv_sizes import AS_CONFIGURED, KvSizes
from djinnd.server.prefixes import PrefixTable
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.share import Share
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
    kv: KvSizes
    placing: Placing
    state: ModelState = "available"
    error: str = ""
    info: ModelInfo | None = None
    vocabulary: Vocabulary | None = None
    engine: EngineClient | None = None  # while it is ready
    changing: asyncio.Task[None] | None = None  # its load or its unload
    progress: Loading | None = None
    listeners: list[OnLoading] = field(default_factory=list)
    share: Share | None = None  # where its weights are, of a model that a client shares

    @property
    def described(self) -> tuple[ModelInfo, Vocabulary]:
        """Of a model that has been ready, as every model with a session has."""
        assert self.info is not None and self.vocabulary is not None
        return self.info, self.vocabulary


class Models:
    """Owns the models' arena. It is the Owner of the engines: what they say about loading comes here. `page_folder`:
    for the pages that engines keep on disk; they outlive the daemon."""

    def __init__(
        self,
        configured: Mapping[str, config.Model],
        sessions: SessionTable,
        arena: Arena,
        engine_for: Callable[[str], Awaitable[EngineClient]],
        page_folder: Path,
        prefixes: PrefixTable,
    ) -> None:
        self._known = known_models(configured)
        self._models = {name: _configured(name, source) for name, source in self._known.items()}
        self._sessions = sessions
        self._arena = arena
        self._arena_lock = asyncio.Lock()
        self._download_lock = asyncio.Lock()  # one at a time: they hold a thread each, for long
        self._engine_for = engine_for
        self._page_folder = page_folder
        self._prefixes = prefixes
        self._arena_changes: set[asyncio.Task[None]] = set()
        self._closing = False

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def find(self, name: str) -> Model:
        """Raises ModelNotFound. A folder or a hub id becomes a known model when somebody loads it."""
        name = os.path.normpath(name) if name.startswith("/") else name
        if name in self._models:
            return self._models[name]
        return _configured(name, model_named(name, self._known))

    def engine_of(self, session: SessionRecord) -> EngineClient | None:
        """The engine that has the session open, if there is one."""
        model = self.model_of(session)
        return None if model is None else model.engine

    def model_of(self, session: SessionRecord) -> Model | None:
        return self._models.get(session.model) if session.is_servable else None

    def is_known(self, name: str) -> bool:
        return name in self._models or name in self._known

    def find_open(self, name: str, client: Client) -> Model:
        """For a new session. Raises ModelNotFound also for what the client may not use, or nobody may any more."""
        model = self.find_visible(name, client)
        if model.share is not None and model.share.ended:
            raise _taken_back(model)
        return model

    def find_visible(self, name: str, client: Client) -> Model:
        """Raises ModelNotFound also for what the client may not see."""
        model = self.find(name)
        if model.share is not None and not model.share.is_open_to(client):
            return _configured(name, model_named(name, self._known))  # raises: no such name is a configured one's
        return model

    def visible(self, client: Client) -> list[Model]:
        return [model for model in self if model.share is None or model.share.is_open_to(client)]

    def preload(self, adopted: Iterable[str] = ()) -> None:
        """What is configured so, and what an earlier daemon had loaded: its blocks, or its pages, are in the arena."""
        for name in adopted:
            try:
                self._start_load(self.find(name))
            except ModelNotFound as error:
                log.info("arena_removed model=%s reason=%s", name, error.message)
                self._arena.remove(name)
        for model in self:
            if model.source.preload and model.changing is None:
                self._start_load(model)

    async def ready(
        self,
        name: str,
        on_loading: OnLoading = lambda _: None,
        kv: KvSizes = AS_CONFIGURED,
        placing: Placing | None = None,
    ) -> EngineClient:
        """The engine that has the model, which is loaded if need be: with so much for its pages and its blocks placed
        so, and as configured where that says nothing. Raises ModelNotFound, and what loading raises.

        The engine lives, and has the model, until the caller waits for something else.
        """
        while (model := self.find(name)).engine is None:
            if model.share is not None and model.share.ended and not self._sessions.of_model(name):
                raise _taken_back(model)
            if model.changing is None:
                model.kv = kv.over(model.kv)
                model.placing = _placing(model, placing)
                self._start_load(model)
            await _join(model, on_loading)
        return model.engine

    async def plan(self, name: str, memory_bytes: int, kv_bytes: int, placing: Placing | None) -> ModelPlan:
        """What loading the model would come to; 0 and None: as configured, and the device's own budget. Raises
        ModelNotFound, and what the engine refuses."""
        model = self.find(name)
        folder = await self._checkpoint(model)
        engine = await self._engine_for(model.name)
        fields = _load_fields(model, folder, _placing(model, placing))
        kv_bytes = kv_bytes or model.kv.device
        planned: Planned = await engine.call(Plan, **fields, kv_bytes=kv_bytes, memory_bytes=memory_bytes)
        return planned.plan

    async def unload(self, model: Model) -> None:
        """Of a model without sessions. Raises InvalidRequest while it is being loaded."""
        if model.changing is not None:
            raise InvalidRequest(f"{model.name} is being loaded: wait for it")
        assert not self._sessions.of_model(model.name)
        engine, model.engine, model.state = model.engine, None, "available"
        model.changing = asyncio.create_task(self._unload(model, engine))
        await _join(model, lambda _: None)

    def add_shared(self, share: Share) -> Model:
        """A model that is known until `drop`."""
        source = config.Model(path=str(share.folder), dtype=share.dtype, kv=share.kv_bytes)
        kv = KvSizes.configured(source)
        model = self._models[share.model] = Model(share.model, source, kv, share.placing, share=share)
        return model

    async def drop(self, share: Share) -> None:
        """Unloads and forgets the share's model, if there is one. It has ended, and has no sessions."""
        model = self._models.get(share.model)
        if model is None or model.share is not share:
            return
        while model.changing is not None:
            with suppress(Exception):  # whoever began to load it is told
                await asyncio.shield(model.changing)
        try:
            await self.unload(model)
        finally:
            del self._models[share.model]
            self._prefixes.forget_shared(share.model)

    def stop(self) -> None:
        """Nothing is loaded any more."""
        self._closing = True
        for model in self:
            if model.changing is not None:
                model.changing.cancel()

    async def close(self, keep_blocks: bool = False) -> None:
        """After `stop`, when the engine is gone. Returns when the arena is empty, or left to the next daemon."""
        changes = [model.changing for model in self if model.changing is not None]
        await asyncio.gather(*changes, *self._arena_changes, return_exceptions=True)
        await self._in_arena(self._arena.leave if keep_blocks else self._arena.close)

    # --- what engines say: see supervisor.Owner ---------------------------------------------------------------------

    def engine_lost(self) -> None:
        """What was ready is loaded again as soon as there is an engine; its sessions follow."""
        for model in self:
            if model.engine is not None:
                for session in self._sessions.of_model(model.name):
                    session.is_lost = bool(session.salt)
                model.engine = None
                if not self._closing:
                    self._start_load(model)

    def described(self, infos: Iterable[ModelInfo]) -> None:
        """The engine has moved blocks of its models."""
        for info in infos:
            model = self._models.get(info.name)
            if model is not None and model.engine is not None:
                model.info = info

    def loading(self, message: Loading) -> None:
        model = self._models.get(message.model)
        if model is not None:
            model.progress = message
            for listener in model.listeners:
                listener(message)

    def need_arena(self, engine: EngineClient, message: NeedArena) -> None:
        model = self._models.get(message.model)
        if message.holds == "pages" and (model is None or model.state not in ("loading", "ready")):
            engine.send(ArenaRefused(message.request, f"{message.model} has been unloaded"))
        elif message.holds == "weights" and model is not None and model.share is not None:
            _grant_window(engine, message, model.share)
        else:
            # Pages that are there are of use however many they are, unless somebody has said how many there shall be.
            any_size = message.holds == "pages" and model is not None and model.kv.host is None
            self._change_arena(self._grant(engine, message, any_size))

    def arena_filled(self, message: ArenaFilled) -> None:
        self._arena.complete(message.model)

    def host_released(self, message: HostReleased) -> None:
        """In turn with grants: what a later engine is granted is another object."""
        self._change_arena(self._in_arena(self._arena.remove, message.model, "weights"))

    def _change_arena(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._arena_changes.add(task)
        task.add_done_callback(self._arena_changes.discard)

    async def _grant(self, engine: EngineClient, message: NeedArena, any_size: bool) -> None:
        grant = partial(self._arena.grant, holds=message.holds, any_size=any_size)
        try:
            name, offset, complete = await self._in_arena(grant, message.model, message.nbytes, message.fingerprint)
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
            if model.kv.host == 0:
                await self._in_arena(self._arena.remove, model.name, "pages")
            fields = _load_fields(model, folder, model.placing) | model.kv.fields
            loaded: Loaded = await engine.call(Load, **fields, disk_folder=self._disk_folder(model))
        except Exception as error:
            await self._load_failed(model, error)
            raise
        finally:
            model.changing = model.progress = None
        model.info, model.vocabulary, model.engine, model.state = loaded.model, vocabulary, engine, "ready"
        for prefix in self._prefixes.of_model(model.name, shared=model.share is not None):
            engine.send(PublicPrefix(model.name, prefix.tokens))
        for session in self._sessions.of_model(model.name):
            open_in(engine, session)
        log.info("model_ready model=%s bytes=%d", model.name, loaded.model.weight_bytes)

    async def _load_failed(self, model: Model, error: Exception) -> None:
        message = error.message if isinstance(error, DjinnError) else repr(error)
        log.error("model_failed model=%s error=%s", model.name, message)
        model.state, model.error = "failed", message
        left = self._arena.remove_incomplete if isinstance(error, EngineLost) else self._arena.remove
        await self._in_arena(left, model.name)
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
        """What callers name themselves, or want otherwise than configured, is known only as long as it is of use."""
        if self._sessions.of_model(model.name) or model.share is not None:
            return
        model.kv, model.placing = KvSizes.configured(model.source), model.source.placing
        if model.name not in self._known:
            self._models.pop(model.name, None)

    def _disk_folder(self, model: Model) -> str:
        """Pages of weights that a client shares are not kept: the next weights of that name may be others, and nothing
        would tell."""
        return str(self._page_folder) if model.share is None else ""

    async def _checkpoint(self, model: Model) -> Path:
        async with self._download_lock:
            return await asyncio.to_thread(find_checkpoint, model.name, model.source.path)

    async def _in_arena(self, act: Callable[..., T], *arguments: Any) -> T:
        """In a thread, because giving and taking gigabytes takes seconds; one at a time."""
        async with self._arena_lock:
            return await asyncio.to_thread(act, *arguments)


def _configured(name: str, source: config.Model) -> Model:
    return Model(name, source, KvSizes.configured(source), source.placing)


def _placing(model: Model, wish: Placing | None) -> Placing:
    """Weights that a client shares lie as they do, and there is no other copy of them."""
    if wish is None or model.share is None:
        return wish or model.placing
    return replace(wish, packing=model.share.placing.packing, keep_host=True)


def _taken_back(model: Model) -> ModelNotFound:
    return ModelNotFound(f"{model.name} is not there any more: who shared it has taken it back")


def _grant_window(engine: EngineClient, message: NeedArena, share: Share) -> None:
    if message.nbytes != share.nbytes:
        told = f"the engine now lays {share.model} out otherwise than when it was shared: share it again"
        engine.send(ArenaRefused(message.request, told))
        return
    try:
        window = os.dup(share.window)
    except OSError as error:
        engine.send(ArenaRefused(message.request, f"no descriptor for the weights of {share.model}: {error}"))
    else:
        engine.send(ArenaReady(message.request, "", 0, complete=True), [window])


def _load_fields(model: Model, folder: Path, placing: Placing) -> dict[str, Any]:
    """What Load and Plan have in common."""
    return {
        "model": model.name,
        "path": str(folder),
        "dtype": model.source.dtype,
        "max_context": model.source.max_context,
        "placing": placing,
        "shared": None if model.share is None else model.share.stored,
    }


def open_in(engine: EngineClient, session: SessionRecord) -> None:
    engine.send(
        Open(session.id, session.model, session.user, session.priority, session.tokens, paused=session.is_paused)
    )


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
