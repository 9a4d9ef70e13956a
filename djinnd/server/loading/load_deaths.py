"""Loads during which an engine died. The next engine loads the model again; after two deaths the model is set aside.

    loading ──engine dies──► loading, alone ──engine dies──► set aside ──djinnctl load──► loading, alone …
                                    └──► ready, the deaths are forgotten

If several models were being loaded when an engine died, one of them is to blame. So after such a death models are
loaded one at a time, until all of these have been loaded or set aside: the next death has one suspect. While a
configured model is loaded again after a death, requests wait too (see ModelTable.ready), because one of them might kill
the engine at that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from djinn_client.errors import EngineLost, ModelRejected
from djinnd.messages import Loaded
from djinnd.server.engines.blame import MOST_DEATHS
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.models.model import ServedModel

log = logging.getLogger("djinnd.server")


class LoadDeaths:
    """Loads models, one at a time after a death. `models` iterates over all known models. `next_engine` waits for an
    engine, without a limit."""

    def __init__(self, models: Iterable[ServedModel], next_engine: Callable[[], Awaitable[EngineClient]]) -> None:
        self._models = models
        self._next_engine = next_engine
        self._alone = asyncio.Lock()
        self.trials: set[ServedModel] = set()  # configured models that an engine died over, until they are loaded

    async def on_an_engine(
        self,
        model: ServedModel,
        check: Callable[[EngineClient], Awaitable[None]],
        load: Callable[[EngineClient], Awaitable[Loaded]],
    ) -> tuple[EngineClient, Loaded]:
        """Loads the model on an engine; returns the engine and its description of the model. A death during `check`
        does not count. Raises ModelRejected if the model is set aside, and the errors of `check` and `load`."""
        try:
            while True:
                async with self._turn():
                    engine = await self._next_engine()
                    with suppress(EngineLost):
                        await check(engine)
                    if engine.lost.done():
                        continue
                    try:
                        loaded = await load(engine)
                    except EngineLost as error:
                        if model.is_configured:
                            self.trials.add(model)
                        _count(model, error)
                    else:
                        model.load_deaths = 0
                        return engine, loaded
        finally:
            self.trials.discard(model)

    def _turn(self) -> AbstractAsyncContextManager[object]:
        is_suspicious = any(model.load_deaths and model.state == "loading" for model in self._models)
        return self._alone if is_suspicious else nullcontext()


def _count(model: ServedModel, error: EngineLost) -> None:
    model.load_deaths += 1
    model.progress = None
    log.error("load_killed_engine model=%s deaths=%d reason=%s", model.name, model.load_deaths, error.message)
    if model.load_deaths >= MOST_DEATHS:
        raise ModelRejected(
            f"{model.load_deaths} engines have died while {model.name} was being loaded ({error.message}): it is set "
            "aside, and all other models are served; `djinnctl load` tries it once more, and the daemon's log has the "
            "details",
            deaths=model.load_deaths,
        ) from error
