"""A model as the server knows it: how it is to be loaded, where it is, and who waits for it. See models.py."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from djinn_client.model_files import ModelFiles
from djinn_client.placing import Placing
from djinn_client.protocol import ModelInfo
from djinnd import config
from djinnd.messages import Loading
from djinnd.server.client import Client
from djinnd.server.engine_client import EngineClient
from djinnd.server.kv_sizes import KvSizes
from djinnd.server.ledger import Ledger
from djinnd.server.model_text import ModelText
from djinnd.server.opened import Marks
from djinnd.server.share import Share

ModelState = Literal["available", "loading", "ready", "asleep", "failed", "set aside"]
OnLoading = Callable[[Loading], None]


@dataclass(slots=True, eq=False)
class Model:
    """`info` and `text` are set when it is ready for the first time, and stay.

    `used`, CLOCK_MONOTONIC: when it was last asked for, or was ready, or a session of it that has gone last had a call;
    `in_use` counts what keeps it awake beside the calls of its sessions. See keep_alive.py."""

    name: str
    source: config.Model
    kv: KvSizes
    placing: Placing
    keep_alive: float  # seconds; 0: it never goes to sleep
    template: str = ""  # for chats, that a load has brought
    state: ModelState = "available"
    error: str = ""
    failed_at: float = 0.0  # when it was last not loaded, because of that error
    load_deaths: int = 0  # of engines that died while it was being loaded, since it was last loaded: see load_deaths.py
    info: ModelInfo | None = None
    text: ModelText | None = None
    is_configured: bool = False  # by an administrator, or shipped with djinnd
    engine: EngineClient | None = None  # while it is ready
    changing: asyncio.Task[None] | None = None  # its load, its way to sleep, or its unload
    progress: Loading | None = None
    listeners: list[OnLoading] = field(default_factory=list)
    files: ModelFiles | None = None  # of its checkpoint; see Folders
    passed: ModelFiles | None = None  # those that an inspection has let pass
    marks: Marks | None = None  # of these, or of those that it had in an earlier daemon
    ledger: Ledger | None = None  # that is charged for them
    payer: Ledger | None = None  # the ledger that is charged for the model and its shared memory, from its load on
    owner: int | None = None  # the user that has brought it, and may decide about it; None: administrators alone
    users: set[int] | None = None  # that have proven that they may read its files; None: it is everybody's
    share: Share | None = None  # where its weights are, of a model that a client shares
    used: float = field(default_factory=time.monotonic)
    in_use: int = 0
    next_look: asyncio.TimerHandle | None = None  # of KeepAlive

    @classmethod
    def configured(cls, name: str, source: config.Model, is_configured: bool = False) -> Model:
        sizes = KvSizes.configured(source)
        return cls(name, source, sizes, source.placing, source.keep_alive, is_configured=is_configured)

    def forget_wishes(self) -> None:
        """What somebody wanted otherwise than configured."""
        self.kv, self.placing = KvSizes.configured(self.source), self.source.placing
        self.keep_alive, self.template = self.source.keep_alive, ""

    def is_open_to(self, client: Client) -> bool:
        """Whether this client may use the model, and know of it."""
        if self.share is not None:
            return self.share.is_open_to(client)
        return self.users is None or client.user in self.users or client.is_admin

    def is_of(self, client: Client) -> bool:
        """Whether this client may say how the model is loaded, and unload it."""
        if self.share is not None:
            return self.share.is_of(client)
        return client.is_admin or client.user == self.owner

    @property
    def opener(self) -> int:
        """The user for whose sake its files are read."""
        if self.share is not None:
            return self.share.user
        return os.geteuid() if self.owner is None else self.owner

    @property
    def described(self) -> tuple[ModelInfo, ModelText]:
        """Of a model that has been ready."""
        assert self.info is not None and self.text is not None
        return self.info, self.text

    def placed(self, wish: Placing | None) -> Placing:
        """Where its blocks are to go. Weights that a client shares lie as they do, and there is no other copy of
        them."""
        if wish is None or self.share is None:
            return wish or self.placing
        return replace(wish, packing=self.share.placing.packing, keep_host=True)

    def load_fields(self, files: ModelFiles, placing: Placing) -> dict[str, Any]:
        """What Load and Plan have in common. The files go with them."""
        return {
            "model": self.name,
            "path": files.folder,
            "files": list(files),
            "others": files.others,
            "dtype": self.source.dtype,
            "max_context": self.source.max_context,
            "placing": placing,
            "shared": None if self.share is None else self.share.stored,
        }

    @property
    def is_leaving(self) -> bool:
        """It is giving its device memory back."""
        return self.changing is not None and self.state in ("asleep", "available")

    async def join(self, on_loading: OnLoading = lambda _: None, missed: asyncio.Future[None] | None = None) -> None:
        """Waits for the change that is under way, which goes on also when the caller goes; or until `missed` is done,
        which raises what was missed."""
        changing = self.changing
        assert changing is not None
        if self.progress is not None:
            on_loading(self.progress)
        self.listeners.append(on_loading)
        try:
            await asyncio.wait(
                [changing] if missed is None else [changing, missed], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self.listeners.remove(on_loading)
        if changing.done() or missed is None:
            changing.result()
        else:
            missed.result()
