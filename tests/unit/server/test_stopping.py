from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop

from djinnd.server.stopping import SIGNALS, Stopping


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("number", SIGNALS)
def test_once_asks_and_twice_is_now(factory, number):
    before = signal.getsignal(number)

    async def play():
        stopping = Stopping()
        with stopping.by_signals():
            os.kill(os.getpid(), number)
            await stopping.asked.wait()
            assert not stopping.now.is_set()
            os.kill(os.getpid(), number)
            await stopping.now.wait()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(play())
    assert signal.getsignal(number) in (before, signal.SIG_DFL)
