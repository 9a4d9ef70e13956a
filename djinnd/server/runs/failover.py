"""Continues runs on the next engine after an engine was lost, from the token where they were. Callers notice a delay.

    submitted ──► ended: the answer
        │  ▲
     engine lost
        ▼  │ its turn, when the model is ready again
      waiting ──► cancelled; no engine for limits.engine_wait; its model cannot be loaded; blamed for two deaths

The session has every token, and random numbers follow from seed and position: the run goes on as it would have. Runs
return one after another, each until its first token. So a run that kills the next engine too was alone, and is blamed
rightly: see blame.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from djinn_client.errors import DjinnError, EngineLost
from djinnd.messages import Truncate
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.engines.blame import MOST_DEATHS
from djinnd.server.loading.models import ModelTable
from djinnd.server.runs.runs import Interrupted, SessionRun
from djinnd.server.wire.call import ClientCall, FinalReply

_TURN = 5.0  # seconds: the longest time that other runs wait for one run's first token on a new engine


class RunFailover:
    """Waits for runs and moves them from a lost engine to the next one."""

    def __init__(self, models: ModelTable, adapters: AdapterTable) -> None:
        self._models = models
        self._adapters = adapters
        self._turn = asyncio.Lock()

    async def answer(self, call: ClientCall, run: SessionRun) -> FinalReply:
        """Returns the answer of a run that was just submitted to an engine. Raises the run's error."""
        call.client.started(call, run)
        try:
            while True:
                try:
                    return await run.done
                except Interrupted as lost:
                    if run.is_cancelled:  # no caller needs more tokens
                        raise asyncio.CancelledError from lost
                    answer = run.completed(self._context(run))
                    if answer is not None:
                        return answer
                    await self._carry_on(run, lost.error)
        except asyncio.CancelledError:
            try:
                answer = run.cut_short()
            finally:
                self._send_length(run)
            if answer is None:
                raise
            return answer

    async def _carry_on(self, run: SessionRun, error: DjinnError) -> None:
        """Returns when another engine has the run. Raises an error if that is not possible; the session then keeps the
        tokens that the client has received."""
        try:
            if not isinstance(error, EngineLost):
                raise error
            if run.deaths >= MOST_DEATHS:
                raise _blamed_error(run, error)
            while not await self._rejoin(run):
                pass
        except DjinnError:
            run.give_up()
            self._send_length(run)
            raise

    async def _rejoin(self, run: SessionRun) -> bool:
        """Waits for the model and for the run's turn, and submits the run. Returns False if the engine was lost
        meanwhile."""
        await self._adapters.engine_for(run.session)
        async with self._turn:
            run.session.expect_model()
            engine = self._models.engine_of(run.session)
            if engine is None:
                return False
            run.submit(engine)
            events: list[asyncio.Future[Any]] = [run.done, run.proven]
            await asyncio.wait(events, timeout=_TURN, return_when=asyncio.FIRST_COMPLETED)
        return True

    def _context(self, run: SessionRun) -> int:
        model = self._models.model_of(run.session)
        assert model is not None or not run.session.is_servable
        return model.info.max_context if model is not None and model.info is not None else 0

    def _send_length(self, run: SessionRun) -> None:
        """Sends the engine the session's length. An engine may have opened the session with more tokens while the run
        waited."""
        self._models.tell(run.session, Truncate(run.session.id, len(run.session.tokens)))


def _blamed_error(run: SessionRun, error: DjinnError) -> EngineLost:
    return EngineLost(
        f"{run.deaths} engines have died with this request in their step, the last one because {error.message}: it is "
        "not tried again; the session keeps the tokens that you have received",
        deaths=run.deaths,
    )
