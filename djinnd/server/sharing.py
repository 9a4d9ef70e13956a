"""The models that clients share: from the first request of one to the end of its last session.

A share belongs to the connection it came by. When that ends it (or has been gone for limits.session_grace), no new
session may use the model; when the last one has gone, the model is unloaded and everything of it given back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from djinn_client.errors import DjinnError, InvalidRequest, NotFound, NotPermitted
from djinn_client.image import Image
from djinn_client.model_files import ModelFiles
from djinn_client.protocol import ShareModel
from djinnd.config import Limits
from djinnd.messages import DescribeImage, ImageDescribed
from djinnd.server.client import Client
from djinnd.server.engine_client import EngineClient
from djinnd.server.inspection import Inspector
from djinnd.server.ledger import ARENA_BYTES, MODELS
from djinnd.server.models import Model, Models, OnLoading
from djinnd.server.sessions import SessionTable
from djinnd.server.share import Share, check_files, sweep

log = logging.getLogger("djinnd.server")

_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # never a folder, nor a hub id


class Sharing:
    """Owns the shares. `folder` is the daemon's own, for their files."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        models: Models,
        sessions: SessionTable,
        engine_for: Callable[[str], Awaitable[EngineClient]],
        inspector: Inspector,
    ) -> None:
        self._folder = folder
        self.limits = limits
        self._models = models
        self._sessions = sessions
        self._engine_for = engine_for
        self._inspector = inspector
        self._shares: dict[str, Share] = {}
        self._closing = False

    def start(self) -> None:
        sweep(self._folder)

    @property
    def windows(self) -> set[int]:
        """The descriptors of all weights."""
        return {share.window for share in self._shares.values() if share.window >= 0}

    # --- a share's beginning ----------------------------------------------------------------------------------------

    async def describe(self, client: Client, request: ShareModel, fd: int) -> tuple[Share, Image]:
        """A new share, and how its weights are to lie. Takes the descriptor; `check` has passed.

        Raises InvalidRequest, OutOfMemory, QuotaExceeded, and what the engine refuses."""
        share = self._new(client, request)
        try:
            share.writing = asyncio.create_task(asyncio.to_thread(share.write_files, fd, request.files))
            await asyncio.shield(share.writing)
            engine = await self._engine_for(share.model)
            image = await self._describe(share, engine)
            self._expect_room(share, image.nbytes)
        except DjinnError:
            await self.withdraw(share)  # so that its name is free when the caller is told
            raise
        except BaseException:
            self._end(share)
            raise
        share.nbytes = image.nbytes
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
            described: ImageDescribed = await engine.call(DescribeImage, **fields)
            return described.image
        with await asyncio.to_thread(ModelFiles.open, str(share.folder)) as files:
            return await self._inspector.describe(share.user, engine, files, **fields)

    def _expect_room(self, share: Share, nbytes: int) -> None:
        """Before the client takes memory for the weights. Raises QuotaExceeded."""
        payer = self._models.payer_of(share.user)
        if payer is not None:
            payer.expect_room(MODELS)
            payer.expect_room(ARENA_BYTES, nbytes)

    def check(self, client: Client, request: ShareModel) -> None:
        """Raises InvalidRequest, NotPermitted."""
        check_files(request.files)
        own = sum(share.user == client.user for share in self._shares.values())
        if own >= self.limits.shared_models_per_user:
            raise NotPermitted(f"you share {own:,} models, the limit of one user: close some", shared=own)
        name = request.model
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name[:100]!r} is no name for a model: letters, digits, '.', '_' and '-'")
        if self._models.is_known(name) or any(share.model == name for share in self._shares.values()):
            raise InvalidRequest(f"there is a model {name} already: share yours under another name", field="model")

    def _new(self, client: Client, request: ShareModel) -> Share:
        number = secrets.token_hex(8)
        share = self._shares[number] = Share(
            id=number,
            model=request.model or f"shared-{number[:8]}",
            user=client.user,
            public=request.public,
            client=client,
            folder=self._folder / number,
            stored=request.stored,
            dtype=request.dtype,
            kv_bytes=request.kv_bytes,
            placing=request.placing,
        )
        return share

    async def accept(self, client: Client, number: str, fd: int, on_loading: OnLoading) -> Model:
        """Makes the share a model that is ready. The descriptor stays the caller's. Raises NotFound, InvalidRequest,
        and what loading raises; the share has ended then."""
        share = self._shares.get(number)
        if share is None or share.client is not client or share.ended:
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
        """Raises QuotaExceeded."""
        payer = self._models.payer_of(share.user)
        if payer is not None:
            payer.charge(ARENA_BYTES, share.nbytes)
            share.payer = payer

    # --- its end ----------------------------------------------------------------------------------------------------

    async def end(self, client: Client, number: str) -> None:
        """Does nothing where this client has no such share (any more)."""
        share = self._shares.get(number)
        if share is not None and share.client is client:
            await self.withdraw(share)

    async def withdraw(self, share: Share) -> None:
        """Whoever shares it. Returns when everything of it is gone; at once where it has sessions."""
        self._end(share)
        if share.leaving is not None:
            await asyncio.shield(share.leaving)

    def detach(self, client: Client) -> None:
        """The client's connection is gone."""
        for share in list(self._shares.values()):
            if share.client is not client:
                continue
            share.client = None
            if share.window < 0:  # nobody will bring its weights
                self._end(share)
            elif not share.ended:
                loop = asyncio.get_running_loop()
                share.grace = loop.call_later(self.limits.session_grace, self._end, share)

    def session_closed(self, model: str) -> None:
        for share in list(self._shares.values()):
            if share.model == model and share.ended:
                self._retire(share)

    async def close(self) -> None:
        """When the engine is gone: gives back everything of all shares."""
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
        """Begins to give the share back, unless somebody uses it or it is on its way out already."""
        if share.leaving is None and not self._closing and not self._sessions.of_model(share.model):
            share.leaving = asyncio.create_task(self._give_back(share))

    async def _give_back(self, share: Share) -> None:
        """Nobody uses it, and nobody can: see Models.ready."""
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
