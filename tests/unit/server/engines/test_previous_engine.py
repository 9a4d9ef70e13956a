"""The engine of a predecessor. A sleeping process stands for an engine while the kernel frees its memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from djinnd.server.engines.previous_engine import ENGINE_FD, PreviousEngine
from djinnd.server.handover.succession import Inherited

Sleeper = subprocess.Popen[bytes]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as process:
        yield process
        process.kill()


def given(process: Sleeper) -> list[Inherited]:
    return [Inherited(ENGINE_FD, os.pidfd_open(process.pid))]


def test_without_a_last_engine_nothing_waits_and_nothing_is_handed_over():
    last = PreviousEngine([])
    asyncio.run(asyncio.wait_for(last.gone(), 1))
    assert last.hand_over() == []


def test_a_waiter_continues_when_the_engine_has_ended_and_later_waits_return_at_once(sleeper):
    (left,) = given(sleeper)

    async def wait() -> None:
        last = PreviousEngine([left])
        waiting = asyncio.create_task(last.gone())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        sleeper.kill()
        async with asyncio.timeout(60):
            await waiting
            await last.gone()
        assert last.hand_over() == []

    asyncio.run(wait())
    assert not os.path.exists(f"/proc/self/fd/{left.fd}")
    assert not os.path.exists(f"/proc/{sleeper.pid}"), "its parent, this process, must reap it"


def test_a_daemon_that_is_stopped_meanwhile_hands_the_engine_on(sleeper):
    handed_over = given(sleeper)

    async def give_up() -> list[Inherited]:
        last = PreviousEngine(handed_over)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last.gone(), 0.05)
        return last.hand_over()

    assert asyncio.run(give_up()) == handed_over
    os.close(handed_over[0].fd)
