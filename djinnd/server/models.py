"""The models: which there are, who may use them, and where they are.

    available ──load──► loading ──► ready ──engine lost──► loading …
        ▲                  │          └─no call for its keep_alive─► asleep ──call──► loading …
        │                  ├─error─► failed ──load──► loading …
        │                  └─two engines died─► set aside ──djinnctl load──► loading …
        └──────── unload ── of a model that is ready, failed, asleep or set aside

Whoever needs a model that is not ready joins its one load (see loader.py) and is told how it goes. A model that is
ready on an engine has all its sessions open there: that is how sessions come back after the loss of an engine, and from
a model's sleep.
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

from djinn_client.errors import DjinnError, ModelNotFound, ModelRejected
from djinn_client.placing import ModelPlan, Placing
from djinn_client.protocol import HandOverFiles, ModelInfo
from djinn_client.pulled import pulled_folder
from djinnd import config
from djinnd.messages import ArenaFilled, HostReleased, Loading, NeedArena, Recomputed, TenantLimits, ToEngine
from djinnd.server import admission, edit_admission
from djinnd.server.arena import Arena
from djinnd.server.blame import MOST_DEATHS, Suspect
from djinnd.server.checkpoints import is_hub_id, known_models, model_named
from djinnd.server.client import Client
from djinnd.server.engine_client import EngineClient
from djinnd.server.folders import Folders
from djinnd.server.granting import Granting
from djinnd.server.inspection import Inspector
from djinnd.server.keep_alive import idle_seconds
from djinnd.server.kv_sizes import AS_CONFIGURED, KvSizes
from djinnd.server.ledger import MODELS, Ledger
from djinnd.server.loader import Loader
from djinnd.server.model import Model as Model
from djinnd.server.model import OnLoading as OnLoading
from djinnd.server.model_records import ModelRecords, Record
from djinnd.server.prefixes import PrefixTable
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.share import Share
from djinnd.server.texts import Texts
from djinnd.server.user_deaths import UserDeaths

log = logging.getLogger("djinnd.server")


class Models:
    """Owns the models' arena. It is the Owner of the engines: what they say about loading comes here. `page_folder`:
    see Loader."""

    def __init__(
        self,
        configured: Mapping[str, config.Model],
        sessions: SessionTable,
        arena: Arena,
        engine_for: Callable[[str], Awaitable[EngineClient]],
        next_engine: Callable[[str], Awaitable[EngineClient]],
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
        """`hub`: whether clients may name hub ids. `is_admin`: whether a user is an administrator."""
        self._known = known_models(configured)
        self._models = {
            name: Model.configured(name, source, is_configured=True) for name, source in self._known.items()
        }
        self._sessions = sessions
        self._engine_for = engine_for
        self._prefixes = prefixes
        self._arena = arena
        self._granting = Granting(arena)
        self._has_hub = hub
        self._ledger_of = ledger_of
        self._records = ModelRecords(state_dir, self._record)
        self._folders = Folders(
            self._models, self._known, sessions, limits, is_admin, self._records.changed, self._forget_unless_used
        )
        self._is_admin = is_admin
        self._user_deaths = UserDeaths(limits)
        self._loader = Loader(
            self,
            sessions,
            prefixes,
            arena,
            self._granting,
            engine_for,
            next_engine,
            page_folder,
            self._folders,
            texts,
            inspector,
            self._user_deaths,
            self._forget_unless_used,
        )
        self._closing = False

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def follow(self, limits: config.Limits) -> None:
        """From now on."""
        self._folders.follow(limits)
        self._user_deaths.limits = limits

    def find(self, name: str) -> Model:
        """Raises ModelNotFound. A hub id becomes a known model when somebody loads it."""
        if name in self._models:
            return self._models[name]
        return Model.configured(name, model_named(name, self._known, self._has_hub), is_configured=name in self._known)

    async def named(self, name: str, client: Client) -> Model:
        """What the client means by it. A folder is opened for that, here or by the client: see Folders. A hub id that
        the daemon's own user has fetched with `djinnctl pull` is its folder, for this user: native clients find it
        themselves, HTTP clients cannot. Raises ModelNotFound, FilesWanted, InvalidRequest, Retry."""
        if name.startswith("/") and name not in self._known:
            return await self._folders.named(name, client)
        if client.user == os.geteuid() and not self.is_known(name) and is_hub_id(name):
            pulled = await self._folders.slow_files.run(client.user, partial(pulled_folder, name))
            if pulled is not None:
                return await self._folders.named(pulled, client)
        model = self.find_visible(name, client)
        if name not in self._models:
            model.owner = client.user
        return model

    async def hand_over(self, client: Client, request: HandOverFiles, fds: list[int]) -> Model:
        """See Folders.take."""
        return await self._folders.take(client, request.folder, request.names, request.others, fds)

    def engine_of(self, session: SessionRecord) -> EngineClient | None:
        """The engine that has the session open, if there is one."""
        model = self.model_of(session)
        return None if model is None else model.engine

    def tell(self, session: SessionRecord, message: ToEngine) -> None:
        """The engine that has the session, if there is one: the next one is told the session as it is."""
        engine = self.engine_of(session)
        if engine is not None:
            engine.send(message)

    def model_of(self, session: SessionRecord) -> Model | None:
        return self._models.get(session.model) if session.is_servable else None

    def is_known(self, name: str) -> bool:
        return name in self._models or name in self._known

    def is_configured(self, model: Model) -> bool:
        return model.name in self._known

    def find_open(self, name: str, client: Client) -> Model:
        """For a new session. Raises ModelNotFound also for what the client may not use, or nobody may any more."""
        model = self.find_visible(name, client)
        expect_open(model)
        return model

    def find_visible(self, name: str, client: Client) -> Model:
        """Raises ModelNotFound also for what the client may not see."""
        model = self.find(name)
        if not model.is_open_to(client):
            return Model.configured(name, model_named(name, self._known, self._has_hub))  # raises: as if it were not
        return model

    def visible(self, client: Client) -> list[Model]:
        return [model for model in self if model.is_open_to(client)]

    def preload(self, adopted: Iterable[str] = ()) -> None:
        """What is configured so, and what an earlier daemon had loaded: its blocks, or its pages, are in the arena.
        What slept there goes on sleeping."""
        adopted = list(adopted)
        self._restore(adopted)
        for name in adopted:
            try:
                model = self._models[name] = self.find(name)
            except ModelNotFound as error:
                log.info("arena_removed model=%s reason=%s", name, error.message)
                self._arena.remove(name)
                continue
            self._adopt_charges(model)
            if self._arena.is_asleep(name):
                model.state = "asleep"
            else:
                self._load(model)
        for model in self:
            if model.source.preload and model.state == "available":
                self._load(model)

    def _restore(self, adopted: list[str]) -> None:
        """Models that users had brought to an earlier daemon, as far as there is something of them."""
        sessions = [session for session in self._sessions if session.is_servable and session.model.startswith("/")]
        used = {*adopted, *(session.model for session in sessions)} - self._known.keys()
        for record in self._records.read():
            if record.name in used:
                model = self._models[record.name] = Model.configured(record.name, config.Model(path=record.folder))
                model.owner, model.users, model.marks = record.owner, set(record.users), record.files
                model.template = record.template
        for session in sessions:
            if session.model not in self._models:  # of a daemon that had no records
                model = Model.configured(session.model, config.Model(path=session.model))
                self._models[session.model] = model
                model.owner, model.users = session.user, {session.user}

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
        """The engine that has the model, which is loaded if need be: with so much for its pages, its blocks placed so,
        awake for so long and with this chat template, and as configured where that says nothing. A model that nobody
        knows yet, from the hub, is then that user's. Raises ModelNotFound, and what loading raises; EngineLost where
        there is no engine for limits.engine_wait.

        Requests wait while a configured model is loaded again after an engine's death: if one of them killed this
        engine, too, the model would be set aside for it.

        The engine lives, and has the model, until the caller waits for something else.
        """
        while (model := self.find(name)).engine is None or self._loader.trials:
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
                self._charge(model)
                model.kv = kv.over(model.kv)
                model.placing = model.placed(placing)
                model.keep_alive = model.keep_alive if keep_alive is None else keep_alive
                model.template = template or model.template
                self._load(model)
            await self._join(model, on_loading)
        model.used = time.monotonic()
        return model.engine

    async def _trials_ended(self) -> None:
        """Raises EngineLost where there has been no engine for limits.engine_wait."""
        for model in list(self._loader.trials):
            try:
                await self._join(model, lambda _: None)
            except DjinnError:
                if model in self._loader.trials:  # it is not the load that has failed: there is no engine
                    raise

    async def _join(self, model: Model, on_loading: OnLoading) -> None:
        missed = asyncio.create_task(self._engine_missed(model.name))
        try:
            await model.join(on_loading, missed)
        finally:
            missed.cancel()
            missed.add_done_callback(_seen)

    async def _engine_missed(self, name: str) -> None:
        """Raises EngineLost when there has been no engine for limits.engine_wait."""
        while True:
            engine = await self._engine_for(name)
            await asyncio.wait([engine.lost])

    def try_again(self, model: Model) -> None:
        """One that is set aside: it may be loaded, and over one more death it is set aside again."""
        assert model.state == "set aside"
        model.state, model.load_deaths = "available", MOST_DEATHS - 1

    def set_keep_alive(self, model: Model, seconds: float) -> None:
        """Of a model that is loaded, being loaded, or asleep."""
        model.keep_alive = seconds
        self._loader.keep_alive.begin(model)

    async def once_ready(self, session: SessionRecord) -> Model:
        """The session's, which has been ready. An earlier daemon's session loads it, and finds out whether its tokens
        and edits still are the model's. Raises SessionLost, ModelNotFound, TokenOutOfRange, InvalidRequest, and what
        loading raises."""
        session.expect_model()
        if self.find(session.model).info is None:
            await self.ready(session.model)
        model = self.find(session.model)
        if session.is_restored:
            admission.check_tokens(session.tokens, model.described[0])
            edit_admission.check_fit(session.edits, model.described[0])
            session.is_restored = False
        return model

    def idle_seconds(self, model: Model) -> float:
        """Since its last call, of a model that is loaded, or asleep; else 0."""
        if model.state not in ("ready", "asleep"):
            return 0.0
        return idle_seconds(model, self._sessions.of_model(model.name))

    @contextmanager
    def in_use(self, session: SessionRecord) -> Iterator[None]:
        """The model does not go to sleep meanwhile, though there is no call on the session, which an engine has."""
        model = self._models[session.model]
        model.in_use += 1
        try:
            yield
        finally:
            model.in_use -= 1
            model.used = time.monotonic()

    def session_closed(self, session: SessionRecord) -> None:
        """When its last call was is known no more."""
        model = self._models.get(session.model)
        if model is not None:
            last = session.used if session.call is None else time.monotonic()
            model.used = max(model.used, last)

    async def plan(self, model: Model, memory_bytes: int, kv_bytes: int, placing: Placing | None) -> ModelPlan:
        """What loading the model would come to; 0 and None: as configured, and the device's own budget. Raises
        ModelNotFound, and what the engine refuses."""
        try:
            return await self._loader.plan(model, memory_bytes, kv_bytes, placing)
        finally:
            if model.state == "available" and model.changing is None:
                self._forget_unless_used(model)

    async def unload(self, model: Model) -> None:
        """Of a model without sessions. Raises InvalidRequest while it is being loaded."""
        await self._loader.unload(model)

    def add_shared(self, share: Share) -> Model:
        """A model that is known until `drop`."""
        source = config.Model(path=str(share.folder), dtype=share.dtype, kv=share.kv_bytes)
        model = self._models[share.model] = Model.configured(share.model, source)
        model.placing, model.share, model.owner = share.placing, share, share.user
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
            _release(model)
            self._prefixes.forget_shared(share.model)

    def stop(self) -> None:
        """Nothing is loaded any more."""
        self._closing = True
        self._loader.stop()

    async def close(self, keep_blocks: bool = False) -> None:
        """After `stop`, when the engine is gone. Returns when the arena is empty, or left to the next daemon."""
        await self._loader.close()
        await self._granting.close(keep_blocks)
        await self._records.close()

    def set_tenants(self, limits: Collection[TenantLimits]) -> None:
        """In every engine that has sessions."""
        for engine in {model.engine for model in self if model.engine is not None}:
            engine.set_tenants(limits)

    # --- what engines say: see supervisor.Owner ---------------------------------------------------------------------

    def engine_lost(self, suspects: Collection[Suspect]) -> bool:
        """What was ready is loaded again as soon as there is an engine; its sessions follow."""
        user = self._blamed_user(suspects)
        if user is not None:
            self._user_deaths.count(user, time.monotonic())
            log.error("user_killed_engine user=%d models=%s", user, sorted({each.model for each in suspects}))
        for model in self:
            if model.engine is not None:
                for session in self._sessions.of_model(model.name):
                    session.is_lost = bool(session.salt)
                model.engine = None
                if not self._closing:
                    self._load(model)
        return user is not None

    def _blamed_user(self, suspects: Collection[Suspect]) -> int | None:
        """The user that the death counts for. None: configured models alone are to blame, or several users, or an
        administrator."""
        models = [self._models.get(each.model) for each in suspects]
        if all(model is None or model.is_configured for model in models):
            return None
        loaders = [None if model is None or model.is_configured else model.owner for model in models]
        users = {loader if each.user is None else each.user for each, loader in zip(suspects, loaders, strict=True)}
        user = users.pop()
        return None if users or user is None or self._is_admin(user) else user

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
        self._granting.need(engine, message, self._models.get(message.model))

    def arena_filled(self, message: ArenaFilled) -> None:
        self._granting.filled(message)

    def recomputed(self, message: Recomputed) -> None:
        for tenant, tokens in message.tokens.items():
            self._sessions.recomputed(tenant, tokens)

    def host_released(self, message: HostReleased) -> None:
        self._granting.released(message)

    # ----------------------------------------------------------------------------------------------------------------

    def payer_of(self, user: int | None) -> Ledger | None:
        """The ledger that is charged for models of this user. Administrators' and configured models are nobody's."""
        return None if user is None or self._is_admin(user) else self._ledger_of(user)

    def _charge(self, model: Model) -> None:
        """Before it is loaded; it counts until it is known no more. Raises QuotaExceeded."""
        payer = self.payer_of(model.owner)
        if payer is not model.payer:
            if payer is not None:
                payer.charge(MODELS)
            _release(model)
            model.payer = payer

    def _adopt_charges(self, model: Model) -> None:
        """It is there, whatever the limits say."""
        payer = self.payer_of(model.owner)
        if payer is not None:
            payer.add(MODELS, 1)
            model.payer = payer
            self._granting.adopted(model.name, payer)

    def _load(self, model: Model) -> None:
        self._models[model.name] = model
        self._loader.load(model)

    def _forget_unless_used(self, model: Model) -> None:
        """What callers name themselves, or want otherwise than configured, is known only as long as it is of use."""
        if self._sessions.of_model(model.name) or model.share is not None:
            return
        model.forget_wishes()
        if model.name not in self._known:
            self._models.pop(model.name, None)
            _release(model)
            self._folders.close(model)
            self._records.changed()

    def _record(self) -> list[Record]:
        return [Record.of(model) for model in self if model.users is not None]


def expect_open(model: Model) -> None:
    """Raises ModelNotFound where new sessions of it are not to be: its client has taken it back."""
    if model.share is not None and model.share.ended:
        raise ModelNotFound(f"{model.name} is not there any more: who shared it has taken it back")


def _release(model: Model) -> None:
    if model.payer is not None:
        model.payer.release(MODELS)
    model.payer = None


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it any more
