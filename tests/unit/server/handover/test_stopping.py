from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop

from djinnd.server.handover.stopping import SIGNALS, Stopping


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_drains_and_two_end_at_once(factory, number):
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
def test_each_sighup_asks_for_a_reload(factory):
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


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_signal_before_the_decision_gives_the_successor_up(factory):
    async def play():
        stopping = Stopping()
        with stopping.by_signals():
            stopping.ask_restart("warm")
            os.kill(os.getpid(), signal.SIGTERM)
            while stopping.restart is not None:
                await asyncio.sleep(0.001)
            stopping.decide()
            assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os.kill(os.getpid(), signal.SIGTERM)
            await stopping.now.wait()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("moment", ["just before", "after"])
def test_a_signal_after_the_decision_waits_for_the_successor(factory, moment):
    """`moment` is that of the signal. A signal that came just before is raised again for the successor."""

    async def play():
        stopping = Stopping()
        with stopping.by_signals():
            stopping.ask_restart("warm")
            if moment == "just before":
                os.kill(os.getpid(), signal.SIGTERM)
            stopping.decide()
            if moment == "after":
                os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert (stopping.restart, stopping.now.is_set()) == ("warm", False)
        assert signal.SIGTERM in signal.sigpending()

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(play())
    finally:
        signal.sigtimedwait([signal.SIGTERM], 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*SIGNALS, signal.SIGHUP])
