"""AdapterTable: the adapters that sessions use, beside their models.

An adapter is named in the configuration of its model, or by a folder. As with checkpoints, the daemon lends no user its
rights: a client opens the folder and hands over the open files, and the daemon itself opens folders only for
administrators and for the configuration.

    OpenSession, adapter "/home/me/tune" ──► FilesWanted
    HandOverFiles, with the open files ────► FilesHandedOver: "/home/me/tune@1a2b3c4d"
    OpenSession, with that name ───────────► …

The digest in the name changes with the files. So a folder that was trained anew is a new adapter, and sessions that are
open stay with the old one, because its files are still open here.

A session keeps the adapter's identity, a hash of its contents. Before each call, `engine_for` loads the adapter on the
engine if that does not have it: after an engine's death, after the model has slept, and after a restart of the daemon,
when the files are opened again by their path. Other contents there are refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from djinn_client.errors import (
    AdapterNotFound,
    DjinnError,
    FilesWanted,
    InvalidRequest,
    ModelNotFound,
    ModelRejected,
    QuotaExceeded,
)
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import HandOverFiles
from djinnd import config
from djinnd.messages import DropAdapter, LoadAdapter
from djinnd.server.adapters.adapter import Adapter
from djinnd.server.checkpoints.folders import folder_name
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.model import ServedModel
from djinnd.server.models.open_files import OpenFiles, digest, duplicates, mark, taken_out
from djinnd.server.quotas.ledger import ADAPTER_BYTES, MODEL_FILES, Ledger
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.session_adapter import SessionAdapter
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.client import ConnectedClient

log = logging.getLogger("djinnd.server")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(eq=False)
class AdapterTable:
    """Owns the adapters' open files. `limits` may be replaced."""

    _models: ModelTable
    _sessions: SessionTable
    limits: config.Limits
    _is_admin: Callable[[int], bool]
    _ledger_of: Callable[[int], Ledger]
    _adapters: dict[tuple[str, str], Adapter] = field(init=False, default_factory=dict)  # by model and name

    def visible(self, client: ConnectedClient) -> Iterator[Adapter]:
        """The adapters that the client may use, also configured ones that were not used yet."""
        for model in self._models:
            if model.is_open_to(client):
                for name in model.source.adapters:
                    self._configured(model, name)
        return (each for each in self._adapters.values() if each.is_open_to(client))

    def is_loaded(self, adapter: Adapter) -> bool:
        """True if an engine has the adapter."""
        model = self._models.known(adapter.model)
        return model is not None and model.engine is not None and adapter.identity in model.adapters

    def sessions_of(self, adapter: Adapter) -> list[SessionRecord]:
        return [session for session in self._sessions.of_model(adapter.model) if _uses(session, adapter)]

    # --- the adapter that a client names ------------------------------------------------------------------------------

    async def named(self, model: ServedModel, name: str, client: ConnectedClient) -> Adapter | None:
        """Finds the adapter; None for "". Raises AdapterNotFound, FilesWanted if the client must open the folder,
        ModelRejected."""
        if not name:
            return None
        known = self._known(model, name, client)
        if known is not None or not name.startswith("/"):
            return known or self.find(model, name, client)
        folder = folder_name(name)
        if not client.is_admin:
            raise _wanted(folder)
        slow_files = self._models.folders.slow_files
        try:
            opened = await slow_files.run(client.user, partial(_open, folder), OpenFiles.close)
        except (ModelNotFound, ModelRejected, InvalidRequest) as error:
            raise _wanted(folder, error.message) from error
        return self._identified(model, folder, opened, client)

    def find(self, model: ServedModel, name: str, client: ConnectedClient) -> Adapter:
        """Finds an adapter by its name, which is no folder's. Raises AdapterNotFound."""
        known = self._known(model, name, client)
        if known is None:
            raise AdapterNotFound(
                f"{model.name} has no adapter {name[:200]!r}: name a folder by its path, or have an administrator add "
                f"it to models.{model.name}.adapters",
                adapter=name[:200],
            )
        return known

    def _known(self, model: ServedModel, name: str, client: ConnectedClient) -> Adapter | None:
        if name in model.source.adapters:
            return self._configured(model, name)
        known = self._adapters.get((model.name, name))
        return known if known is not None and known.is_open_to(client) else None

    async def take(
        self, model: ServedModel, client: ConnectedClient, request: HandOverFiles, fds: list[int]
    ) -> Adapter:
        """Returns the adapter with these files, which the client has handed over. Takes the descriptors out of the
        list. Raises InvalidRequest, QuotaExceeded, ModelRejected, Retry."""
        slow_files = self._models.folders.slow_files
        try:
            folder = folder_name(request.folder)
            work = partial(_take_over, folder, request.names, fds)
            opened = await slow_files.run(client.user, work, OpenFiles.close)
        finally:
            if fds:
                client.traffic.discard(taken_out(fds))
        return self._identified(model, folder, opened, client)

    def _configured(self, model: ServedModel, name: str) -> Adapter:
        key = model.name, name
        if key not in self._adapters:
            self._adapters[key] = Adapter(name, model.name, model.source.adapters[name], is_configured=True)
        return self._adapters[key]

    def _identified(self, model: ServedModel, folder: str, opened: OpenFiles, client: ConnectedClient) -> Adapter:
        """Finds or adds the adapter with these files. Owns the files from now on. Raises QuotaExceeded."""
        name = f"{folder}@{digest(opened.marks)}"
        adapter = self._adapters.get((model.name, name))
        if adapter is None:
            adapter = Adapter(name, model.name, folder, owner=client.user)
        try:
            if adapter.files is None:
                self._give_files(adapter, opened)
            else:
                self._let_go(client.user, opened.files)
        except BaseException:
            self._let_go(client.user, opened.files)
            raise
        self._adapters[model.name, name] = adapter
        adapter.users.add(client.user)
        return adapter

    def _give_files(self, adapter: Adapter, opened: OpenFiles) -> None:
        if adapter.owner is not None and not self._is_admin(adapter.owner):
            ledger = self._ledger_of(adapter.owner)
            self._make_room(ledger, adapter)
            ledger.charge(MODEL_FILES, len(opened.marks))
            adapter.payer = ledger
        adapter.files, adapter.marks = opened.files, opened.marks

    def _let_go(self, user: int, files: ModelFiles) -> None:
        self._models.folders.slow_files.let_go(user, files.close)

    # --- on an engine -------------------------------------------------------------------------------------------------

    async def load(self, adapter: Adapter) -> EngineClient:
        """Returns the engine that has the adapter and its model; loads them if necessary. The engine is alive and has
        both until the caller next awaits. Raises ModelRejected for an adapter that is not served, OutOfMemory,
        QuotaExceeded, EngineLost, and the errors of a load of the model."""
        while True:
            engine = await self._models.ready(adapter.model)
            if self.is_loaded(adapter):
                adapter.used = time.monotonic()
                return engine
            async with adapter.turn:
                if not self.is_loaded(adapter):
                    await self._load_on(adapter, engine)

    async def chosen(self, model: ServedModel, adapter: Adapter | None) -> tuple[EngineClient, SessionAdapter | None]:
        """Returns the engine for a new session of the model with this adapter or none, and the session's adapter. As
        `load`, otherwise."""
        if adapter is None:
            return await self._models.ready(model.name), None
        return await self.load(adapter), SessionAdapter(adapter.name, adapter.identity)

    async def engine_for(self, session: SessionRecord) -> EngineClient:
        """Returns the engine that has the session's model and its adapter, if it has one; loads them if necessary. The
        engine is alive and has both until the caller next awaits. Raises AdapterNotFound if the adapter's files are
        gone or have other contents, and the errors of `load`."""
        wanted = session.adapter
        if wanted is None:
            return await self._models.ready(session.model)
        adapter = self._with(session.model, wanted) or await self._found_again(session, wanted)
        engine = await self.load(adapter)
        if adapter.identity != wanted.identity:
            raise _changed(adapter.folder)
        return engine

    async def _load_on(self, adapter: Adapter, engine: EngineClient) -> None:
        files = await self._files_of(adapter)
        fields = {"model": adapter.model, "folder": adapter.folder, "files": list(files)}
        loaded = await engine.call(LoadAdapter, duplicates(files), most_bytes=self.limits.adapter_bytes, **fields)
        model = self._models.known(adapter.model)
        if model is None or model.engine is not engine:
            return
        try:
            self._charge(adapter, loaded.nbytes)
        except QuotaExceeded:
            engine.send(DropAdapter(adapter.model, loaded.identity))
            raise
        model.adapters.add(loaded.identity)
        adapter.identity, adapter.rank, adapter.modules = loaded.identity, loaded.rank, loaded.modules
        told = (adapter.model, adapter.name, loaded.rank, loaded.nbytes)
        log.info("adapter_loaded model=%s adapter=%s rank=%d bytes=%d", *told)

    def _charge(self, adapter: Adapter, nbytes: int) -> None:
        """Charges the adapter's memory, which the engine has taken, to its owner. Raises QuotaExceeded."""
        if adapter.payer is not None:
            adapter.payer.release(ADAPTER_BYTES, adapter.nbytes)
            held, adapter.nbytes = adapter.nbytes, 0
            self._make_room(adapter.payer, adapter, nbytes)
            try:
                adapter.payer.charge(ADAPTER_BYTES, nbytes)
            except QuotaExceeded:
                adapter.payer.add(ADAPTER_BYTES, held)
                adapter.nbytes = held
                raise
        adapter.nbytes = nbytes

    def _make_room(self, ledger: Ledger, spared: Adapter, nbytes: int = 0) -> None:
        """Drops the owner's adapters without sessions, the longest unused first, until its limits allow these bytes,
        two more files, and one more adapter in all."""
        own = [each for each in self._adapters.values() if each.payer is ledger and each is not spared]
        for adapter in sorted(own, key=lambda each: each.used):
            if ledger.has_room(ADAPTER_BYTES, nbytes) and ledger.has_room(MODEL_FILES, 2):
                return
            if not adapter.turn.locked() and not self.sessions_of(adapter):
                self.drop(adapter)

    async def _files_of(self, adapter: Adapter) -> ModelFiles:
        if adapter.files is None:
            slow_files, user = self._models.folders.slow_files, self._opener(adapter)
            opened = await slow_files.run(user, partial(_open, adapter.folder), OpenFiles.close)
            self._give_files(adapter, opened)
        assert adapter.files is not None
        return adapter.files

    def _opener(self, adapter: Adapter) -> int:
        """The user for whom its files are read: the daemon's own for a configured adapter."""
        return os.geteuid() if adapter.owner is None else adapter.owner

    def _with(self, model: str, wanted: SessionAdapter) -> Adapter | None:
        named = self._adapters.get((model, wanted.name))
        if named is not None and named.identity in (b"", wanted.identity):
            return named
        return next((a for (of, _), a in self._adapters.items() if of == model and a.identity == wanted.identity), None)

    async def _found_again(self, session: SessionRecord, wanted: SessionAdapter) -> Adapter:
        """Opens the adapter of a session that an earlier daemon has left. The session's user has proved then that it
        may read these contents; other contents at the path are refused unread."""
        model = self._models.find(session.model)
        if wanted.name in model.source.adapters:
            return self._configured(model, wanted.name)
        folder, _, _ = wanted.name.rpartition("@")
        if not folder.startswith("/"):
            raise AdapterNotFound(f"{session.model} has no adapter {wanted.name!r} any more", adapter=wanted.name)
        slow_files = self._models.folders.slow_files
        try:
            opened = await slow_files.run(session.user, partial(_open, folder), OpenFiles.close)
        except DjinnError as error:
            raise _changed(folder) from error
        if f"{folder}@{digest(opened.marks)}" != wanted.name:
            self._let_go(session.user, opened.files)
            raise _changed(folder)
        adapter = Adapter(wanted.name, model.name, folder, owner=session.user, users={session.user})
        self._give_files(adapter, opened)
        return self._adapters.setdefault((model.name, wanted.name), adapter)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drop(self, adapter: Adapter) -> None:
        """Forgets an adapter without sessions: the engine gives its memory back, and its files are closed. A configured
        one is loaded again at its next use."""
        model = self._models.known(adapter.model)
        if model is not None and adapter.identity in model.adapters and not self._others_with(adapter):
            model.adapters.discard(adapter.identity)
            if model.engine is not None:
                model.engine.send(DropAdapter(adapter.model, adapter.identity))
        if adapter.files is not None:
            self._let_go(self._opener(adapter), adapter.files)
        if adapter.payer is not None:
            adapter.payer.release(MODEL_FILES, len(adapter.marks or ()))
            adapter.payer.release(ADAPTER_BYTES, adapter.nbytes)
        self._adapters.pop((adapter.model, adapter.name), None)

    def _others_with(self, adapter: Adapter) -> bool:
        """True if another adapter of the model has the same contents."""
        return any(
            each is not adapter and (each.model, each.identity) == (adapter.model, adapter.identity)
            for each in self._adapters.values()
        )

    def model_gone(self, model: str) -> None:
        """Forgets the adapters of a model that the daemon has forgotten."""
        for adapter in [each for each in self._adapters.values() if each.model == model]:
            self.drop(adapter)


def _uses(session: SessionRecord, adapter: Adapter) -> bool:
    return session.adapter is not None and session.adapter.identity == adapter.identity


def _open(folder: str) -> OpenFiles:
    """Opens an adapter's folder; for a thread. Raises ModelNotFound, ModelRejected, InvalidRequest."""
    return _checked(ModelFiles.open(folder))


def _take_over(folder: str, names: list[str], fds: list[int]) -> OpenFiles:
    """Checks files that a client has handed over; for a thread. Takes the descriptors out of the list. Raises
    InvalidRequest, ModelRejected."""
    return _checked(ModelFiles.handed_over(folder, names, taken_out(fds)))


def _checked(files: ModelFiles) -> OpenFiles:
    try:
        for name in (CONFIG, WEIGHTS):
            if name not in files:
                told = f"{files.folder} is not a PEFT adapter: it has no {name}"
                raise ModelRejected(told, file=name)
        files.keep((CONFIG, WEIGHTS))
        return OpenFiles(files, {name: mark(files.stat(name)) for name in files})
    except BaseException:
        files.close()
        raise


def _wanted(folder: str, why: str = "") -> FilesWanted:
    return FilesWanted(
        f"{why or 'djinnd opens no folder for its users'}: hand over the open files of {folder}, as djinn_client does "
        "by itself (this one may be too old), or have an administrator configure the adapter",
        folder=folder,
    )


def _changed(folder: str) -> AdapterNotFound:
    return AdapterNotFound(
        f"the session's adapter is not in {folder} any more, or its files have changed: read the session's tokens, and "
        "continue with them in a new session",
        adapter=folder,
    )
