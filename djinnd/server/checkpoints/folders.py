"""Checkpoint folders: finds the model of a folder that a user names, and keeps the open files of all models.

The daemon lends no user its rights. A client opens the folder that it names and hands over the open files, which proves
that it may read them. The daemon opens a folder itself only for administrators (among them root and its own user) and
for configured models.

A checkpoint is identified by the devices and inodes of its files. So it is one model for all users that have proved
that they may read it, under whatever path. Two folders of the same path (another user's mount, or new files in place of
old ones) are two models. A model is named after the path by which it first came. If that name is taken, `@` and a
digest are appended.

The files stay open as long as the model is known, so it can be loaded again without its path. After a restart of the
daemon they are opened again by their path, if that leads to the same files, unchanged.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import partial

from djinn_client.errors import DjinnError, FilesWanted, InvalidRequest, ModelNotFound, ModelRejected, Retry
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import HandOverFiles
from djinnd import config
from djinnd.server.checkpoints.hub import Hub
from djinnd.server.checkpoints.names import is_hub_id
from djinnd.server.models.model import ServedModel
from djinnd.server.models.open_files import Marks, OpenFiles, are_same, digest, is_at, open_folder, take_over, taken_out
from djinnd.server.quotas.ledger import MODEL_FILES
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.system.slow_files import SlowFiles
from djinnd.server.wire.client import ConnectedClient

MAX_NAME = 1900  # bytes of a path: the header of an arena object has room for that many
_UNUSED = 60.0  # seconds that the files of a model are kept if it is not loaded


@dataclass(eq=False)
class Folders:
    """Identifies checkpoints and owns their open files. `models` are all known models, by name; ModelTable owns them.
    `changed` is called when a user has gained access to a model, and `unused` with a model that was not loaded in
    time."""

    _models: dict[str, ServedModel]
    _sessions: SessionTable
    limits: InitVar[config.Limits]
    _is_admin: Callable[[int], bool]
    _changed: Callable[[], None]
    _unused: Callable[[ServedModel], None]

    def __post_init__(self, limits: config.Limits) -> None:
        self.hub = Hub(limits)
        self.slow_files = SlowFiles(limits.files)

    def follow(self, limits: config.Limits) -> None:
        """Applies new limits."""
        self.hub.limits, self.slow_files.seconds = limits, limits.files

    # --- the model of a folder ----------------------------------------------------------------------------------------

    async def named(self, name: str, client: ConnectedClient) -> ServedModel:
        """The model in a folder. Raises FilesWanted if the client must open the folder, InvalidRequest if it is no
        path."""
        folder = folder_name(name)
        there = self._models.get(folder)
        if there is not None and there.users and client.user in there.users and there.marks:
            return there
        if not client.is_admin:
            raise _wanted(folder)
        try:
            opened = await self.slow_files.run(client.user, partial(open_folder, folder), OpenFiles.close)
        except (ModelNotFound, ModelRejected, InvalidRequest) as error:
            raise _wanted(folder, error.message) from error
        return await self._identify(folder, opened, client)

    async def take(self, client: ConnectedClient, request: HandOverFiles, fds: list[int]) -> ServedModel:
        """Returns the model with these files, which the client has handed over. Takes the descriptors out of the list.
        Raises InvalidRequest, QuotaExceeded, ModelNotFound, Retry."""
        try:
            work = partial(take_over, folder_name(request.folder), request.names, fds, request.others)
            opened = await self.slow_files.run(client.user, work, OpenFiles.close)
        finally:
            if fds:
                client.traffic.discard(taken_out(fds))
        return await self._identify(opened.files.folder, opened, client)

    async def _identify(self, folder: str, opened: OpenFiles, client: ConnectedClient) -> ServedModel:
        """Finds or adds the model with these files. Owns the files from now on."""
        try:
            configured = await self._configured_model_with(opened.marks)
            model = self._model_with(opened.marks) or configured or self._model_without_files(folder, client.user)
            if model is None:
                model = self._add(folder, opened, client)
            elif model.users is None or model.files is not None:
                self.slow_files.let_go(client.user, opened.close)
            else:
                self._give_files(model, opened, client)
        except BaseException:
            self.slow_files.let_go(client.user, opened.close)
            raise
        if model.users is not None:
            model.users.add(client.user)
            self._changed()
        return model

    def _model_with(self, marks: Marks) -> ServedModel | None:
        for model in self._models.values():
            if model.share is None and model.marks is not None and are_same(model.marks, marks):
                return model
        return None

    async def _configured_model_with(self, marks: Marks) -> ServedModel | None:
        """The configured model with these files, if it is not loaded. `_model_with` finds loaded ones."""
        configured = [model for model in self._models.values() if model.is_configured]

        def find() -> ServedModel | None:
            folders = (model for model in configured if not is_hub_id(model.source.path))
            return next((model for model in folders if is_at(model.source.path, marks)), None)

        return await self.slow_files.run(os.geteuid(), find)

    def _model_without_files(self, folder: str, user: int) -> ServedModel | None:
        """The model of that name that has lost its files, if only this user has sessions of it."""
        model = self._models.get(folder)
        if model is None or model.users is None or model.files is not None or model.changing is not None:
            return None
        return model if all(session.user == user for session in self._sessions.of_model(folder)) else None

    def _add(self, folder: str, opened: OpenFiles, client: ConnectedClient) -> ServedModel:
        name = folder if folder not in self._models else f"{folder}@{digest(opened.marks)}"
        model = ServedModel.of(name, config.Model(path=folder))
        model.users = set()
        self._give_files(model, opened, client)
        self._models[name] = model
        asyncio.get_running_loop().call_later(_UNUSED, self._drop_if_unused, weakref.ref(model))
        return model

    def _give_files(self, model: ServedModel, opened: OpenFiles, client: ConnectedClient) -> None:
        """Gives the files to the model and charges the client's user for them. Raises QuotaExceeded."""
        ledger = client.tenant.ledger
        ledger.charge(MODEL_FILES, len(opened.marks))
        if model.marks is None or not are_same(model.marks, opened.marks):  # other users proved access to other files
            model.owner, model.users = client.user, set()
        model.files, model.marks, model.ledger = opened.files, opened.marks, ledger

    def _drop_if_unused(self, found: weakref.ref[ServedModel]) -> None:
        model = found()  # the timer keeps no model that was unloaded meanwhile
        if model is None:
            return
        if model.state == "available" and model.changing is None and self._models.get(model.name) is model:
            self._unused(model)

    # --- open files ---------------------------------------------------------------------------------------------------

    async def files_of(self, model: ServedModel) -> ModelFiles:
        """Returns the model's open files. They are opened once, and belong to the model until `close`. Raises
        ModelNotFound, ModelRejected, Retry."""
        if model.files is None:
            opened = await self._open(model)
            if model.files is not None:  # another load has opened them meanwhile
                self.slow_files.let_go(model.opener, opened.close)
            else:
                model.files, model.marks = opened.files, opened.marks
        return model.files

    def close(self, model: ServedModel) -> None:
        """Closes the model's files. The next load opens them again."""
        if model.files is not None:
            ledger, charged = model.ledger, len(model.marks or ())

            def closed() -> None:
                if ledger is not None:
                    ledger.release(MODEL_FILES, charged)

            self.slow_files.let_go(model.opener, model.files.close, closed)
        model.files = model.marks = model.ledger = None

    async def _open(self, model: ServedModel) -> OpenFiles:
        folder = model.source.path
        if is_hub_id(folder):
            folder = await self.hub.folder(folder, model.opener)
        elif model.users is not None and not self._is_admin(model.opener):
            return await self._open_again(model)
        return await self.slow_files.run(model.opener, partial(open_folder, folder), OpenFiles.close)

    async def _open_again(self, model: ServedModel) -> OpenFiles:
        """Opens the files of a model that a user brought to an earlier daemon. If the path now leads to other files,
        the user learns nothing about them."""
        wanted = FilesWanted(
            f"djinnd has lost the files of {model.name}, as it was restarted: `djinnctl load {model.source.path}`, or "
            "opening a session with it, hands them over again",
            folder=model.source.path,
        )
        if model.marks is None:
            raise wanted
        try:
            opened = await self.slow_files.run(model.opener, partial(open_folder, model.source.path), OpenFiles.close)
        except Retry:
            raise
        except DjinnError:
            raise wanted from None
        if opened.marks != model.marks:
            self.slow_files.let_go(model.opener, opened.close)
            raise wanted
        return opened


def folder_name(name: str) -> str:
    """Normalises a folder's path. Raises InvalidRequest if it is not absolute, or too long."""
    if not name.startswith("/") or "\0" in name:
        raise InvalidRequest(f"{name[:200]!r} is no absolute path of a folder", field="folder")
    folder = "/" + os.path.normpath(name).lstrip("/")
    if (length := len(os.fsencode(folder))) > MAX_NAME:
        raise InvalidRequest(f"a folder's name of {length:,} bytes is too long: at most {MAX_NAME:,}", limit=MAX_NAME)
    return folder


def _wanted(folder: str, why: str = "") -> FilesWanted:
    return FilesWanted(
        f"{why or 'djinnd opens no folder for its users'}: hand over the open files of {folder}, as djinn_client does "
        "by itself (this one may be too old), or have an administrator configure the model",
        folder=folder,
    )
