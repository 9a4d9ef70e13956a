"""The models that the daemon knows, the users that may use them, and their states.

    available ──load──► loading ──► ready ──engine lost──► loading …
        ▲                  │          └─no call for its keep_alive─► asleep ──call──► loading …
        │                  ├─error─► failed ──load──► loading …
        │                  └─two engines died─► set aside ──djinnctl load──► loading …
        └──────── unload ── of a model that is ready, failed, asleep or set aside

Requests for a model that is not ready share one load (see loader.py) and receive its progress. Each session of a ready
model is open on its engine. This is how sessions come back after the loss of an engine, and when a model wakes up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from djinn_client.errors import DjinnError, InvalidRequest, ModelNotFound, ModelRejected
from djinn_client.files.pulled import pulled_folder
from djinn_client.protocol.fields.placing import Placing
from djinnd import config
from djinnd.messages import TenantLimits, ToEngine
from djinnd.server.admission import admission
from djinnd.server.admission import edits as edit_admission
from djinnd.server.arenas.arena import Arena
from djinnd.server.checkpoints.folders import Folders
from djinnd.server.checkpoints.inspection import Inspector
from djinnd.server.checkpoints.names import hub_model, is_hub_id, known_models
from djinnd.server.checkpoints.records import ModelRecord, ModelRecords
from djinnd.server.engines.blame import MOST_DEATHS
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.arena_requests import ArenaRequests
from djinnd.server.loading.charges import ModelCharges
from djinnd.server.loading.engine_events import ModelEvents
from djinnd.server.loading.loader import ModelLifecycle, mark_error_seen
from djinnd.server.loading.restoring import restore
from djinnd.server.loading.user_deaths import UserDeaths
from djinnd.server.models.keep_alive import idle_seconds
from djinnd.server.models.kv_sizes import AS_CONFIGURED, KvSizes
from djinnd.server.models.model import OnLoading as OnLoading
from djinnd.server.models.model import ServedModel as ServedModel
from djinnd.server.models.share import Share
from djinnd.server.quotas.ledger import Ledger
from djinnd.server.sessions.prefixes import PrefixTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.text.texts import Texts
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.client import ConnectedClient

log = logging.getLogger("djinnd.server")


class ModelTable:
    """The table of models. Owns their arena. `folders` owns their files, `lifecycle` loads and unloads them, `events`
    receives the engines' messages about them. `page_folder`: see ModelLifecycle."""

    def __init__(
        self,
        configured: Mapping[str, config.Model],
        sessions: SessionTable,
        arena: Arena,
        engine: Callable[[], Awaitable[EngineClient]],
        next_engine: Callable[[], Awaitable[EngineClient]],
        page_folder: Path,
        prefixes: PrefixTable,
        limits: config.Limits,
        texts: Texts,
        inspector: Inspector,
        hub: bool,
        state_dir: str,
        is_admin: Callable[[int], bool],
        ledger_of: Callable[[int], Ledger],
    ) -> None:
        """`hub`: clients may name hub ids. `is_admin` returns True for administrators."""
        self._models = {
            name: ServedModel.of(name, source, is_configured=True) for name, source in known_models(configured).items()
        }
        self._sessions = sessions
        self._engine = engine
        self._prefixes = prefixes
        self._arena = arena
        self._arena_requests = ArenaRequests(arena)
        self._has_hub = hub
        self.charges = ModelCharges(is_admin, ledger_of)
        self._records = ModelRecords(state_dir, self._record)
        self.folders = Folders(
            self._models, sessions, limits, is_admin, self._records.changed, self._forget_unless_used
        )
        self._user_deaths = UserDeaths(limits)
        self.lifecycle = ModelLifecycle(
            self,
            sessions,
            prefixes,
            arena,
            self._arena_requests,
            engine,
            next_engine,
            page_folder,
            self.folders,
            texts,
            inspector,
            self._user_deaths,
            self._forget_unless_used,
        )
        self.events = ModelEvents(
            self._models, sessions, self._arena_requests, texts, self._user_deaths, is_admin, self._load_again
        )
        self._closing = False
        self.on_forgotten: Callable[[str], None] = lambda name: None  # called with a model that is known no longer

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def follow(self, limits: config.Limits) -> None:
        """Applies new limits."""
        self.folders.follow(limits)
        self._user_deaths.limits = limits

    def find(self, name: str, client: ConnectedClient | None = None) -> ServedModel:
        """Finds a model by its name. A hub id becomes a known model when a client loads it. Raises ModelNotFound, also
        if `client` may not see the model."""
        model = self._models.get(name)
        if model is not None and (client is None or model.is_open_to(client)):
            return model
        configured = [each.name for each in self if each.is_configured]
        return ServedModel.of(name, hub_model(name, configured, self._has_hub))

    async def named(self, name: str, client: ConnectedClient) -> ServedModel:
        """Finds the model that a client names. If it names a folder, the folder is opened, here or by the client (see
        Folders). For the daemon's own user, a hub id that `djinnctl pull` has fetched stands for its folder: native
        clients find the folder themselves, HTTP clients cannot. Raises ModelNotFound, FilesWanted, InvalidRequest,
        Retry."""
        known = self._models.get(name)
        if name.startswith("/") and not (known is not None and known.is_configured):
            return await self.folders.named(name, client)
        if client.user == os.geteuid() and known is None and is_hub_id(name):
            pulled = await self.folders.slow_files.run(client.user, partial(pulled_folder, name))
            if pulled is not None:
                return await self.folders.named(pulled, client)
        model = self.find(name, client)
        if name not in self._models:
            model.owner = client.user
        return model

    def split(self, name: str) -> tuple[str, str]:
        """The model and the adapter that MODEL:ADAPTER names; "": none. A known model may have a colon in its name."""
        model, _, adapter = name.rpartition(":")
        return (name, "") if name in self._models or model not in self._models else (model, adapter)

    def engine_of(self, session: SessionRecord) -> EngineClient | None:
        """The engine on which the session is open, or None."""
        model = self.model_of(session)
        return None if model is None else model.engine

    def tell(self, session: SessionRecord, message: ToEngine) -> None:
        """Sends a message about a session to its engine. Without an engine nothing is sent: the next engine receives
        the session's state when it opens the session."""
        engine = self.engine_of(session)
        if engine is not None:
            engine.send(message)

    def model_of(self, session: SessionRecord) -> ServedModel | None:
        return self._models.get(session.model) if session.is_servable else None

    def known(self, name: str) -> ServedModel | None:
        """The model of this name, if the daemon knows it. A hub id is known from its first load on."""
        return self._models.get(name)

    def is_known(self, name: str) -> bool:
        return name in self._models

    def find_open(self, name: str, client: ConnectedClient) -> ServedModel:
        """Finds a model for a new session. Raises ModelNotFound, also if the client may not use the model or its owner
        has withdrawn it, and InvalidRequest for the head of a checkpoint."""
        model = self.find(name, client)
        expect_open(model)
        expect_whole(model)
        return model

    async def once_loaded(self, name: str, call: ClientCall) -> ServedModel:
        """Finds the model that a call names, alone or with an adapter, and loads it unless it has been ready once.
        Raises the errors of `named`, of a load, and of find_open."""
        model = await self.named(self.split(name)[0], call.client)
        expect_open(model)
        expect_whole(model)
        if model.info is None:
            await self.ready(model.name, call.tell_loading, user=call.client.user)
        return self.find_open(model.name, call.client)

    def visible(self, client: ConnectedClient) -> list[ServedModel]:
        return [model for model in self if model.is_open_to(client)]

    def preload(self, adopted: Iterable[str] = ()) -> None:
        """At startup: loads the models that the configuration preloads, and the models of `adopted`, for which an
        earlier daemon has left weights or pages in the arena. An adopted model that was asleep stays asleep."""
        adopted = list(adopted)
        restore(self._models, self._records.read(), list(self._sessions), adopted, self.find)
        for name in adopted:
            try:
                model = self._models[name] = self.find(name)
            except ModelNotFound as error:
                log.info("arena_removed model=%s reason=%s", name, error.message)
                self._arena.remove(name)
                continue
            self.charges.adopt(model)
            if model.payer is not None:
                self._arena_requests.adopted(name, model.payer)
            if self._arena.is_asleep(name):
                model.state = "asleep"
            else:
                self._load(model)
        for model in self:
            if model.source.preload and model.state == "available":
                self._load(model)

    async def ready(
        self,
        name: str,
        on_loading: OnLoading = lambda _: None,
        kv: KvSizes = AS_CONFIGURED,
        placing: Placing | None = None,
        keep_alive: float | None = None,
        user: int | None = None,
        template: str = "",
    ) -> EngineClient:
        """Returns the engine that has the model; loads the model first if necessary.

        `kv`, `placing`, `keep_alive` and `template` override the configuration for this load. A model of the hub that
        was not known before belongs to `user`. Raises ModelNotFound, the errors of a load, and EngineLost if there is
        no engine for limits.engine_wait.

        After an engine's death, requests wait while configured models are loaded again one by one (LoadDeaths.trials).
        If a request had killed the new engine during such a load, the model would be blamed and set aside.

        The engine is alive and has the model until the caller next awaits.
        """
        while (model := self.find(name)).engine is None or self.lifecycle.deaths.trials:
            if model.engine is not None:
                await self._trials_ended()
                continue
            if not self._sessions.of_model(name):
                expect_open(model)
            if model.state == "set aside":
                raise ModelRejected(model.error)
            if name not in self._models:
                model.owner = user
            if model.changing is None:
                self.charges.charge(model)
                model.kv = kv.over(model.kv)
                model.placing = model.placed(placing)
                model.keep_alive = model.keep_alive if keep_alive is None else keep_alive
                if template and template != model.template:
                    model.template = template
                    self._records.changed()
                self._load(model)
            await self._join(model, on_loading)
        model.used = time.monotonic()
        return model.engine

    async def _trials_ended(self) -> None:
        """Waits until no configured model is on trial. Raises EngineLost if there was no engine for
        limits.engine_wait."""
        for model in list(self.lifecycle.deaths.trials):
            try:
                await self._join(model, lambda _: None)
            except DjinnError:
                if model in self.lifecycle.deaths.trials:  # the load has not failed: there is no engine
                    raise

    async def _join(self, model: ServedModel, on_loading: OnLoading) -> None:
        missed = asyncio.create_task(self._engine_missed())
        try:
            await model.join(on_loading, missed)
        finally:
            missed.cancel()
            missed.add_done_callback(mark_error_seen)

    async def _engine_missed(self) -> None:
        """Returns never. Raises EngineLost when there was no engine for limits.engine_wait."""
        while True:
            engine = await self._engine()
            await asyncio.wait([engine.lost])

    def try_again(self, model: ServedModel) -> None:
        """Makes a model that is set aside available for one more load. One more death sets it aside again."""
        assert model.state == "set aside"
        model.state, model.load_deaths = "available", MOST_DEATHS - 1

    def set_keep_alive(self, model: ServedModel, seconds: float) -> None:
        """Sets the idle time after which a model sleeps. The model is loaded, being loaded, or asleep."""
        model.keep_alive = seconds
        self.lifecycle.keep_alive.begin(model)

    async def once_ready(self, session: SessionRecord) -> ServedModel:
        """Returns the session's model, after it has been ready once. For a session of an earlier daemon this loads the
        model and checks that the session's tokens and edits fit it. Raises SessionLost, ModelNotFound, TokenOutOfRange,
        InvalidRequest, and the errors of a load."""
        session.expect_model()
        if self.find(session.model).info is None:
            await self.ready(session.model)
        model = self.find(session.model)
        if session.is_restored:
            admission.check_tokens(session.tokens, model.described[0])
            edit_admission.check_fit(session.edits, model.described[0])
            session.is_restored = False
        return model

    def idle_seconds(self, model: ServedModel) -> float:
        """Seconds since the model's last call, if it is loaded or asleep; else 0."""
        if model.state not in ("ready", "asleep"):
            return 0.0
        return idle_seconds(model, self._sessions.of_model(model.name))

    @contextmanager
    def in_use(self, session: SessionRecord) -> Iterator[None]:
        """Keeps the model awake during the block, for work on an open session that is not a call."""
        model = self._models[session.model]
        model.in_use += 1
        try:
            yield
        finally:
            model.in_use -= 1
            model.used = time.monotonic()

    def session_closed(self, session: SessionRecord) -> None:
        """Remembers when the closed session had its last call, for the model's keep-alive."""
        model = self._models.get(session.model)
        if model is not None:
            last = session.used if session.call is None else time.monotonic()
            model.used = max(model.used, last)

    def add_shared(self, share: Share) -> ServedModel:
        """Adds the model that a client shares. It is known until `drop`."""
        source = config.Model(path=str(share.folder), dtype=share.dtype, kv=share.kv_bytes)
        model = self._models[share.model] = ServedModel.of(share.model, source)
        model.placing, model.share, model.owner = share.placing, share, share.user
        return model

    async def drop(self, share: Share) -> None:
        """Unloads and forgets a share's model, if it is known. The share has ended and has no sessions."""
        model = self._models.get(share.model)
        if model is None or model.share is not share:
            return
        while model.changing is not None:
            with suppress(Exception):  # reported to the request that began the load
                await asyncio.shield(model.changing)
        try:
            await self.lifecycle.unload(model)
        finally:
            del self._models[share.model]
            self.charges.release(model)
            self.on_forgotten(model.name)
            self._prefixes.forget_shared(share.model)

    def stop(self) -> None:
        """Ends all loads; none begins after this."""
        self._closing = True
        self.lifecycle.stop()

    async def close(self, keep_blocks: bool = False) -> None:
        """Called after `stop`, when the engine is gone. Returns when the arena is empty, or is left to the next
        daemon."""
        await self.lifecycle.close()
        await self._arena_requests.close(keep_blocks)
        await self._records.close()

    def set_tenants(self, limits: Collection[TenantLimits]) -> None:
        """Sends the tenants' limits to each engine that has a model."""
        for engine in {model.engine for model in self if model.engine is not None}:
            engine.set_tenants(limits)

    def _load(self, model: ServedModel) -> None:
        self._models[model.name] = model
        self.lifecycle.load(model)

    def _load_again(self, model: ServedModel) -> None:
        if not self._closing:
            self._load(model)

    def _forget_unless_used(self, model: ServedModel) -> None:
        """Drops settings that differ from the configuration, and forgets a model that users brought, unless it still
        has sessions or is shared."""
        if self._sessions.of_model(model.name) or model.share is not None:
            return
        had_template = bool(model.template)
        model.reset_options()
        if not model.is_configured:
            self._models.pop(model.name, None)
            self.charges.release(model)
            self.folders.close(model)
            self.on_forgotten(model.name)
        if had_template or not model.is_configured:
            self._records.changed()

    def _record(self) -> list[ModelRecord]:
        return [
            ModelRecord.of(model) for model in self if model.users is not None or (model.template and not model.share)
        ]


def expect_open(model: ServedModel) -> None:
    """Raises ModelNotFound if the client that shares the model has withdrawn it: no new session may use it."""
    if model.share is not None and model.share.ended:
        raise ModelNotFound(f"{model.name} is no longer shared: its client has withdrawn it")


def expect_whole(model: ServedModel) -> None:
    """Raises InvalidRequest if the model is the head of a checkpoint: it has no sessions."""
    if model.source.part == "heads":
        told = f"{model.name} is the head of a checkpoint, and guesses only for a model that has it as its draft: "
        raise InvalidRequest(f"{told}open the session on that model", field="model")
