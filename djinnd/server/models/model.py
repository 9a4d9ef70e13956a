"""A model as the server sees it: how it is loaded, where it is, and which requests wait for it. See models.py."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from djinn_client.errors import InvalidRequest
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.placing import Placing
from djinnd import config
from djinnd.messages import Loading
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.models.call_counts import CallCounts
from djinnd.server.models.kv_sizes import KvSizes
from djinnd.server.models.open_files import Marks
from djinnd.server.models.share import Share
from djinnd.server.models.text import ModelText
from djinnd.server.quotas.ledger import Ledger
from djinnd.server.wire.client import ConnectedClient

ModelState = Literal["available", "loading", "ready", "asleep", "failed", "set aside"]
OnLoading = Callable[[Loading], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class ServedModel:
    """State of one model.

    `info` and `text` are set when the model is first ready, and stay.

    `used` (CLOCK_MONOTONIC) is the last time of: a request for the model, the end of its load, the last call of a
    session that has been closed. `in_use` counts work beside the calls of sessions that keeps the model awake. See
    keep_alive.py.
    """

    name: str
    source: config.Model
    kv: KvSizes
    placing: Placing
    keep_alive: float  # seconds of idleness before it sleeps; 0: never
    template: str = ""  # chat template that came with a load; empty: the checkpoint's
    state: ModelState = "available"
    error: str = ""
    failed_at: float = 0.0  # when the last load failed with `error`
    load_deaths: int = 0  # engines that died during a load of it since it was last ready: see load_deaths.py
    info: ModelInfo | None = None
    text: ModelText | None = None
    is_configured: bool = False  # by an administrator, or shipped with djinnd
    engine: EngineClient | None = None  # while it is ready
    adapters: set[bytes] = field(default_factory=set)  # identities of the adapters that its engine has
    changing: asyncio.Task[None] | None = None  # a load, a transition to sleep, or an unload
    progress: Loading | None = None
    listeners: list[OnLoading] = field(default_factory=list)
    files: ModelFiles | None = None  # the checkpoint's open files; see Folders
    passed: ModelFiles | None = None  # the files that passed inspection
    marks: Marks | None = None  # identity of `files`, or of the files that an earlier daemon had
    ledger: Ledger | None = None  # the ledger that is charged for `files`
    payer: Ledger | None = None  # the ledger that is charged for the model and its shared memory, from its load on
    owner: int | None = None  # the user that brought it, and may load and unload it; None: only administrators may
    users: set[int] | None = None  # users that have proved that they may read its files; None: all users may use it
    share: Share | None = None  # location of the weights, if a client shares the model
    used: float = field(default_factory=time.monotonic)
    in_use: int = 0
    next_look: asyncio.TimerHandle | None = None  # timer of KeepAlive
    calls: CallCounts = field(default_factory=CallCounts)

    @classmethod
    def of(cls, name: str, source: config.Model, is_configured: bool = False) -> ServedModel:
        """A model that is not loaded, with the settings of its source."""
        sizes = KvSizes.configured(source)
        return cls(name, source, sizes, source.placing, source.keep_alive, is_configured=is_configured)

    def reset_options(self) -> None:
        """Resets to the configuration all settings that requests have changed."""
        self.kv, self.placing = KvSizes.configured(self.source), self.source.placing
        self.keep_alive, self.template = self.source.keep_alive, ""

    def is_open_to(self, client: ConnectedClient) -> bool:
        """True if this client may use the model, and know that it exists."""
        if self.share is not None:
            return self.share.public or self.is_of(client)
        return self.users is None or client.user in self.users or client.is_admin

    def is_of(self, client: ConnectedClient) -> bool:
        """True if this client may load and unload the model."""
        return client.is_admin or client.user == self.owner

    @property
    def opener(self) -> int:
        """The user for whom its files are read."""
        return os.geteuid() if self.owner is None else self.owner

    @property
    def described(self) -> tuple[ModelInfo, ModelText]:
        """`info` and `text` of a model that has been ready."""
        assert self.info is not None and self.text is not None
        return self.info, self.text

    def placed(self, wish: Placing | None) -> Placing:
        """The placing of its blocks for a load: the configured one, or a caller's wish with what only the configuration
        sets. A shared model keeps its form of packing and its host copy, because the client's memory holds the only
        copy of its weights."""
        if wish is None:
            return self.placing
        of_daemon = ["part", "cpu_beside_bus", "adapter_bytes", "prefetch", "piece_bytes"]
        if self.source.part == "heads":
            of_daemon += ["resident", "speculation", "draft"]
        wish = replace(wish, **{name: getattr(self.source.placing, name) for name in of_daemon})
        if self.share is None:
            return wish
        if wish.quantise:
            told = f"{self.name} has the weights that a client shares, which cannot be quantised"
            raise InvalidRequest(told, field="quantise")
        return replace(wish, packing=self.share.placing.packing, keep_host=True)

    def load_fields(self, files: ModelFiles, placing: Placing) -> dict[str, Any]:
        """The fields that Load and Plan have in common. The open files travel with the message."""
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
        """True while the model is giving back its device memory."""
        return self.changing is not None and self.state in ("asleep", "available")

    async def join(self, on_loading: OnLoading = lambda _: None, missed: asyncio.Future[None] | None = None) -> None:
        """Waits until the change under way ends. The change continues if the caller is cancelled. Returns earlier if
        `missed` is done, and raises its error."""
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
