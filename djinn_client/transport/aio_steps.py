"""How asyncio waits for steps: through the running loop's readiness callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from djinn_client.transport.steps import PAUSE_S, HasCalls, Steps, Wait, describe

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    steps: Callable[Concatenate[C, P], Steps[T]],
) -> Callable[Concatenate[HasCalls[C], P], Coroutine[Any, Any, T]]:
    """The coroutine function of an asyncio client that runs these steps and returns what they return."""

    async def call(client: HasCalls[C], /, *args: P.args, **options: P.kwargs) -> T:
        return await run(steps(client._calls, *args, **options))

    describe(call, steps)
    return call


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
        await asyncio.sleep(PAUSE_S if wait.seconds is None else wait.seconds)
        return
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    reading = wait.what == "read"
    (loop.add_reader if reading else loop.add_writer)(wait.fd, _wake, ready)
    late = None if wait.seconds is None else loop.call_later(wait.seconds, _wake, ready)
    try:
        await ready
    finally:
        if late is not None:
            late.cancel()
        (loop.remove_reader if reading else loop.remove_writer)(wait.fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
