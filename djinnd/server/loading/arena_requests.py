"""Grants engines objects of the arena, and removes the objects of models.

To reserve or free gigabytes takes seconds. So all these changes run in a thread, one after another, in the order of the
requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from djinn_client.errors import OutOfMemory, QuotaExceeded
from djinnd.messages import ArenaFilled, ArenaReady, ArenaRefused, Holding, HostReleased, NeedArena
from djinnd.server.arenas.arena import Arena
from djinnd.server.arenas.charges import ArenaCharges
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.models.model import ServedModel
from djinnd.server.models.share import Share
from djinnd.server.quotas.ledger import Ledger


class ArenaRequests:
    """Changes the arena, one change at a time. ModelEvents passes on the engines' messages."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._charges = ArenaCharges(arena)
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()  # under way, on engines' requests

    # --- messages from engines: see engine_client.EngineEvents ------------------------------------------------------

    def need(self, engine: EngineClient, message: NeedArena, model: ServedModel | None) -> None:
        """Handles an engine's request for memory. `model` is the model of that name, or None if it is no longer
        known."""
        if message.holds == "pages" and (model is None or model.state not in ("loading", "ready")):
            engine.send(ArenaRefused(message.request, f"{message.model} has been unloaded"))
        elif message.holds == "weights" and model is not None and model.share is not None:
            _grant_window(engine, message, model.share)
        else:
            # Existing pages are useful in any number, unless host_kv sets the number.
            any_size = message.holds == "pages" and model is not None and model.kv.host is None
            payer = None if model is None else model.payer
            self._begin(self._grant(engine, message, any_size, payer))

    def filled(self, message: ArenaFilled) -> None:
        self._arena.complete(message.model, message.identity)

    def released(self, message: HostReleased) -> None:
        """Removes the weights, in order with grants: a later engine gets another object."""
        self._begin(self.remove(message.model, "weights"))

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _grant(self, engine: EngineClient, message: NeedArena, any_size: bool, payer: Ledger | None) -> None:
        """Charges the payer and grants the object."""
        model, holds = message.model, message.holds
        wanted = (model, message.nbytes, message.fingerprint, holds)
        try:
            async with self._lock:
                self._charges.reserve((model, holds), payer, self._arena.bytes_to_grant(*wanted, any_size=any_size))
                try:
                    granted = await asyncio.to_thread(partial(self._arena.grant, *wanted, any_size=any_size))
                finally:
                    self._charges.settle(model)
        except (OutOfMemory, QuotaExceeded) as error:
            engine.send(ArenaRefused(message.request, error.message, error.data, error.code))
        except OSError as error:
            engine.send(ArenaRefused(message.request, f"no shared memory for {model}: {error}"))
        else:
            name, offset, complete, identity = granted
            engine.send(ArenaReady(message.request, name, offset, complete, identity=identity))

    # --- requests of the server ---------------------------------------------------------------------------------------

    def adopted(self, model: str, payer: Ledger) -> None:
        """At startup: charges the objects that an earlier daemon has left for this model."""
        self._charges.adopt(model, payer)

    async def remove(self, model: str, holds: Holding | None = None) -> None:
        """Removes objects of the model. See Arena.remove."""
        await self._remove(model, partial(self._arena.remove, model, holds))

    async def remove_incomplete(self, model: str) -> None:
        await self._remove(model, partial(self._arena.remove_incomplete, model))

    async def _remove(self, model: str, act: Callable[[], None]) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(act)
            finally:
                self._charges.settle(model)

    async def close(self, keep_blocks: bool) -> None:
        """Called when no engine is left. Returns when the arena is empty, or is left to the next daemon."""
        await asyncio.gather(*self._changes, return_exceptions=True)
        async with self._lock:
            await asyncio.to_thread(self._arena.leave if keep_blocks else self._arena.close)


def _grant_window(engine: EngineClient, message: NeedArena, share: Share) -> None:
    """Grants the window of a client that shares its weights: they are not in the arena."""
    if message.nbytes != share.nbytes:
        told = f"the layout of {share.model} has changed since it was shared: share it again"
        engine.send(ArenaRefused(message.request, told))
        return
    try:
        window = os.dup(share.window)
    except OSError as error:
        engine.send(ArenaRefused(message.request, f"no descriptor for the weights of {share.model}: {error}"))
    else:
        engine.send(ArenaReady(message.request, "", 0, complete=True), [window])
