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


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_sighup_asks_for_a_reload_as_often_as_it_comes(factory):
    async def play():
        stopping = Stopping()
        with stopping.by_signals():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await stopping.reload.wait()
                stopping.reload.clear()
            assert not stopping.asked.is_set()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(play())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
