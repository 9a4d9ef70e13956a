from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from djinnd.gateway.responses.running import Running

NAME = ("alice", "resp_1")
ANSWER: Any = object()  # which `Running` only hands on


async def replies(count: int, ended: list[str]) -> AsyncGenerator[int]:
    """Yields `count` numbers, and then waits for ever."""
    try:
        for number in range(count):
            yield number
        await asyncio.Event().wait()
    finally:
        ended.append("closed")


async def consume(running: Running, count: int, ended: list[str], read: asyncio.Event, came: list[int]) -> None:
    """Takes what comes; its client reads the last one only when `read` is set."""
    with running.entered(*NAME, ANSWER) as entry:
        async with aclosing(replies(count, ended)) as source, aclosing(entry.until_cancelled(source)) as uncancelled:
            async for reply in uncancelled:
                came.append(reply)
                if reply == count - 1:
                    await read.wait()
    ended.append("over")


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_cancelled_response_ends_with_what_has_come(is_slow):
    async def main() -> None:
        running, ended, came, read = Running(), [], [], asyncio.Event()
        if not is_slow:
            read.set()
        task = asyncio.create_task(consume(running, 3, ended, read, came))
        await asyncio.sleep(0)
        cancelling = asyncio.create_task(running.cancel(*NAME))
        await asyncio.sleep(0)
        assert not (is_slow and cancelling.done())
        read.set()
        assert await cancelling is ANSWER
        await task
        assert (came, ended) == ([0, 1, 2], ["closed", "over"])
        assert await running.cancel(*NAME) is None

    asyncio.run(main())


def test_a_task_that_somebody_else_cancels_is_cancelled():
    async def main() -> None:
        ended: list[str] = []
        read = asyncio.Event()
        read.set()
        task = asyncio.create_task(consume(Running(), 1, ended, read, []))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["closed"]

    asyncio.run(main())
