"""Several sessions of this process, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import djinn_client as djinn
from djinn_client.protocol import Class


@asynccontextmanager
async def open_sessions(
    address: str, model: str, count: int, priority: Class | None = None
) -> AsyncIterator[list[djinn.AsyncSession]]:
    """Opens so many sessions, and closes them at the end."""
    sessions = [djinn.AsyncSession(model, priority=priority, address=address) for _ in range(count)]
    async with AsyncExitStack() as stack:
        for session in sessions:
            await stack.enter_async_context(session)
        yield sessions


async def generate_all(sessions: Sequence[djinn.AsyncSession], tokens: int) -> list[djinn.Generated]:
    """Lets all sessions generate at once."""
    return await asyncio.gather(*(session.generate(max_tokens=tokens, ignore_eos=True) for session in sessions))


async def step_seconds(sessions: Sequence[djinn.AsyncSession], tokens: int) -> float:
    """Seconds of a step while these sessions decode together, by the daemon's timings."""
    timings = [reply.timings for reply in await generate_all(sessions, tokens)]
    return max(timing.total - timing.first_token for timing in timings) / (tokens - 1)
