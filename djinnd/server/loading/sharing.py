"""The models that clients share, from the first request to the end of the last session.

A share belongs to a connection, and to others that bring the same weights. When all have ended the share, or have been
closed for limits.session_grace, no new session may use the model. When its last session is closed, the model is
unloaded and all its memory freed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djinn_client.errors import DjinnError, InvalidRequest, NotFound, NotPermitted
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import ShareModel
from djinn_client.protocol.fields.image import Image
from djinnd.config import Limits
from djinnd.messages import DescribeImage
from djinnd.server.checkpoints.inspection import Inspector
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.loading.models import ModelTable, OnLoading, ServedModel
from djinnd.server.models.share import Share, check_files, sweep
from djinnd.server.quotas.ledger import ARENA_BYTES, MODELS
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.client import ConnectedClient

log = logging.getLogger("djinnd.server")

_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # never a path or a hub id


@dataclass(eq=False)
class ShareTable:
    """All shares. `folder` holds their files; it belongs to this daemon."""

    _folder: Path
    limits: Limits
    _models: ModelTable
    _sessions: SessionTable
    _engine: Callable[[], Awaitable[EngineClient]]
    _inspector: Inspector
    _shares: dict[str, Share] = field(init=False, default_factory=dict)
    _closing: bool = field(init=False, default=False)

    def start(self) -> None:
        sweep(self._folder)

    @property
    def windows(self) -> set[int]:
        """The descriptors of all windows with weights."""
        return {share.window for share in self._shares.values() if share.window >= 0}

    # --- beginning of a share -----------------------------------------------------------------------------------------

    async def describe(self, client: ConnectedClient, request: ShareModel, fd: int) -> tuple[Share, Image]:
        """Creates a share, and returns it with the layout that its weights must have. Called after `check`. Owns the
        descriptor. Raises InvalidRequest, OutOfMemory, QuotaExceeded, and the engine's refusals."""
        share = self._new(client, request)
        try:
            share.writing = asyncio.create_task(asyncio.to_thread(share.write_files, fd, request.files))
            await asyncio.shield(share.writing)
            engine = await self._engine()
            image = await self._describe(share, engine)
            self._expect_room(share, image.nbytes)
        except DjinnError:
            await self.withdraw(share)  # first, so that the name is free when the client has the error
            raise
        except BaseException:
            self._end(share)
            raise
        share.image = image
        return share, image

    async def _describe(self, share: Share, engine: EngineClient) -> Image:
        fields: dict[str, Any] = {
            "model": share.model,
            "path": str(share.folder),
            "dtype": share.dtype,
            "placing": share.placing,
            "shared": share.stored,
        }
        if not self._inspector.is_there:
            described = await engine.call(DescribeImage, **fields)
            return described.image
        with await asyncio.to_thread(ModelFiles.open, str(share.folder)) as files:
            return await self._inspector.describe(share.user, engine, files, **fields)

    def _expect_room(self, share: Share, nbytes: int) -> None:
        """Checks the user's limits before the client allocates memory for the weights. Raises QuotaExceeded."""
        payer = self._models.charges.payer_of(share.user)
        if payer is not None:
            payer.expect_room(MODELS)
            payer.expect_room(ARENA_BYTES, nbytes)

    def check(self, client: ConnectedClient, request: ShareModel) -> None:
        """Checks the files, the name and the limit of shares. Raises InvalidRequest, NotPermitted."""
        check_files(request.files)
        own = sum(share.user == client.user for share in self._shares.values())
        if own >= self.limits.shared_models_per_user:
            raise NotPermitted(f"you share {own:,} models, the limit of one user: close some", shared=own)
        name = request.model
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name[:100]!r} is no valid model name: letters, digits, '.', '_' and '-'")
        if self._models.is_known(name) or any(share.model == name for share in self._shares.values()):
            raise InvalidRequest(f"there is a model {name} already: share yours under another name", field="model")

    def _new(self, client: ConnectedClient, request: ShareModel) -> Share:
        number = secrets.token_hex(8)
        share = self._shares[number] = Share(
            id=number,
            model=request.model or f"shared-{number[:8]}",
            user=client.user,
            public=request.public,
            clients={client},
            folder=self._folder / number,
            stored=request.stored,
            dtype=request.dtype,
            kv_bytes=request.kv_bytes,
            placing=request.placing,
            content=request.content,
        )
        return share

    async def join(self, client: ConnectedClient, request: ShareModel, on_loading: OnLoading) -> Share | None:
        """The share of this user that has the weights of the request already; None if there is none. It belongs to the
        client, too, from now on. Raises the errors of a load."""
        for share in self._shares.values():
            if share.user == client.user and share.window >= 0 and not share.ended and share.is_as_in(request):
                share.clients.add(client)
                if share.grace is not None:
                    share.grace.cancel()
                await self._models.ready(share.model, on_loading)
                return share
        return None

    async def accept(self, client: ConnectedClient, number: str, fd: int, on_loading: OnLoading) -> ServedModel:
        """Takes the weights, and returns the model when it is ready. The descriptor stays the caller's. Raises
        NotFound, InvalidRequest, and the errors of a load; then the share has ended."""
        share = self._shares.get(number)
        if share is None or client not in share.clients or share.ended:
            raise NotFound("this connection has no such share: begin with ShareModel", share=number[:64])
        if share.window >= 0 or not share.nbytes:
            raise InvalidRequest(f"{share.model} has its weights already, or is not described yet")
        try:
            share.open_window(fd)
            self._charge(share)
            model = self._models.add_shared(share)
            await self._models.ready(share.model, on_loading)
        except DjinnError:
            await self.withdraw(share)
            raise
        log.info("model_shared model=%s user=%d bytes=%d", share.model, share.user, share.nbytes)
        return model

    def _charge(self, share: Share) -> None:
        """Charges the user for the weights. Raises QuotaExceeded."""
        payer = self._models.charges.payer_of(share.user)
        if payer is not None:
            payer.charge(ARENA_BYTES, share.nbytes)
            share.payer = payer

    # --- end of a share -----------------------------------------------------------------------------------------------

    async def end(self, client: ConnectedClient, number: str) -> None:
        """Ends a share of this client, unless it belongs to others, too. Does nothing if the client has no such
        share."""
        share = self._shares.get(number)
        if share is not None and client in share.clients:
            share.clients.discard(client)
            if not share.clients:
                await self.withdraw(share)

    async def withdraw(self, share: Share) -> None:
        """Ends a share. Returns when all its memory is freed; at once if it still has sessions."""
        self._end(share)
        if share.leaving is not None:
            await asyncio.shield(share.leaving)

    def detach(self, client: ConnectedClient) -> None:
        """Called when a client's connection has closed: shares that belong to no other end after their grace time."""
        for share in list(self._shares.values()):
            if client not in share.clients:
                continue
            share.clients.discard(client)
            if share.clients:
                continue
            if share.window < 0:  # its weights can no longer come
                self._end(share)
            elif not share.ended:
                loop = asyncio.get_running_loop()
                share.grace = loop.call_later(self.limits.session_grace, self._end, share)

    def session_closed(self, model: str) -> None:
        for share in list(self._shares.values()):
            if share.model == model and share.ended:
                self._retire(share)

    async def close(self) -> None:
        """Frees all shares. Called when the engine is gone."""
        self._closing = True
        for share in list(self._shares.values()):
            if share.grace is not None:
                share.grace.cancel()
            if share.leaving is None:
                share.leaving = asyncio.create_task(self._release(share))
            await share.leaving

    def _end(self, share: Share) -> None:
        share.ended = True
        self._sessions.close_kept(share.model)
        if share.grace is not None:
            share.grace.cancel()
        self._retire(share)

    def _retire(self, share: Share) -> None:
        """Begins to free an ended share, unless it has sessions or is being freed."""
        if share.leaving is None and not self._closing and not self._sessions.of_model(share.model):
            share.leaving = asyncio.create_task(self._unload_and_release(share))

    async def _unload_and_release(self, share: Share) -> None:
        """Unloads the model and frees the share. No session uses the model, and none can be opened: see
        ModelTable.ready."""
        try:
            await self._models.drop(share)
        except DjinnError as error:
            log.warning("unload_failed model=%s error=%s", share.model, error.message)
        await self._release(share)

    async def _release(self, share: Share) -> None:
        if share.writing is not None:
            await asyncio.wait([share.writing])
        await asyncio.to_thread(share.release)
        if share.payer is not None:
            share.payer.release(ARENA_BYTES, share.nbytes)
        del self._shares[share.id]
        log.info("share_ended model=%s user=%d", share.model, share.user)
