"""An adapter of one model, as the server knows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from djinn_client.files.model_files import ModelFiles
from djinnd.server.models.open_files import Marks
from djinnd.server.quotas.ledger import Ledger
from djinnd.server.wire.client import ConnectedClient


@dataclass(slots=True, eq=False)
class Adapter:
    """`identity`, `rank`, `modules` and `nbytes` are as of the last load on an engine; before the first, `identity` is
    empty."""

    name: str  # in the configuration, or FOLDER@DIGEST with a digest of its files' marks
    model: str
    folder: str
    is_configured: bool = False
    users: set[int] = field(default_factory=set)  # users that have proved that they may read its files
    owner: int | None = None  # the user that brought it; None: it is configured
    files: ModelFiles | None = None
    marks: Marks | None = None
    payer: Ledger | None = None  # the ledger that is charged for its files and its memory
    identity: bytes = b""
    rank: int = 0
    modules: int = 0
    nbytes: int = 0
    used: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by a load

    def is_open_to(self, client: ConnectedClient) -> bool:
        """True if this client may use the adapter, and know that it exists."""
        return self.is_configured or client.user in self.users or client.is_admin
