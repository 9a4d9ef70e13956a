"""Agents as clients of djinnd: each has a session, and tells the daemon more or less about its waits.

none        nothing: the daemon sees an idle session, and evicts the longest idle first
signals     when a tool begins, and when it has ended
tool        also the tool's name; the daemon has to learn its duration
expected    also the expected duration
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from enum import StrEnum

import djinn_client as djinn
from tools.bench.agents.loop import Answer, Refused
from tools.bench.agents.plan import Wait
from tools.bench.harness.paged_model import MODEL


class Way(StrEnum):
    NONE = "none"
    SIGNALS = "signals"
    TOOL = "tool"
    EXPECTED = "expected"


class Sessions:
    """Begins agents' conversations on a daemon: a Server."""

    def __init__(self, address: str, way: Way) -> None:
        self._address = address
        self._way = way

    async def begin(self) -> SessionTalk:
        session = djinn.AsyncSession(MODEL, priority="agent", address=self._address)
        try:
            return SessionTalk(await session.open(), self._way)
        except djinn.DjinnError as error:
            raise _refused(error) from error


class SessionTalk:
    """An agent's session as a Talk. The talk owns the session."""

    def __init__(self, session: djinn.AsyncSession, way: Way) -> None:
        self._session = session
        self._way = way

    async def turn(self, tokens: Sequence[int], new: int) -> Answer:
        times: list[float] = []
        stream = self._session.stream(tokens, max_tokens=new, ignore_eos=True)
        try:
            async for piece in stream:
                times += [time.perf_counter()] * len(piece.token_ids)
        except djinn.DjinnError as error:
            raise _refused(error) from error
        return Answer(times, stream.result.usage.computed_tokens)

    @asynccontextmanager
    async def waiting(self, wait: Wait) -> AsyncIterator[None]:
        try:
            async with self._said(wait):
                yield
        except djinn.DjinnError as error:
            raise _refused(error) from error

    async def close(self) -> None:
        await self._session.close()

    def _said(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        match self._way:
            case Way.NONE:
                return nullcontext()
            case Way.SIGNALS:
                return self._session.io_wait()
            case Way.TOOL:
                return self._session.io_wait(tool=wait.tool)
            case Way.EXPECTED:
                return self._session.io_wait(expected_s=wait.seconds)


def _refused(error: djinn.DjinnError) -> Refused:
    return Refused(f"{error.code}: {error.message}")
