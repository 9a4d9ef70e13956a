"""How asyncio waits for steps: through the running loop's readiness callbacks."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from djinn_client.transport.steps import PAUSE_S, Steps, Wait

T = TypeVar("T")


async def run(steps: Steps[T]) -> T:
    """Runs the steps to their end in this task and returns what they return."""
    try:
        while True:
            await _wait(next(steps))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def _wait(wait: Wait) -> None:
    if wait.what == "pause":
        await asyncio.sleep(PAUSE_S)
        return
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    reading = wait.what == "read"
    (loop.add_reader if reading else loop.add_writer)(wait.fd, _wake, ready)
    try:
        await ready
    finally:
        (loop.remove_reader if reading else loop.remove_writer)(wait.fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
