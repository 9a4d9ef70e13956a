"""The engine dies by SIGKILL: every caller hears of it at once, and the next engine goes on where the sessions were."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.protocol import Done, Failure, LoadModel, Ping, Progress
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, is_alive, wait_for
from tests.support.models import reduced_model
from tests.support.served import Wire

PROMPTS = ["def fibonacci(", "class Tree:\n    def __init__(self", "import os\n\n", "for i in range("]
BEFORE, AFTER = 8, 40  # tokens of a session before and after the engine's death
NO_END = 1900  # tokens: nearly the whole context, which takes seconds


@pytest.fixture
def fragile(start_daemon: DaemonStarter) -> Daemon:
    """A daemon whose engine a test kills. (Its own: after five deaths in a minute there is no next engine.)"""
    limits = {"engine_silence": "1h"}  # so it is by the engine's death that callers hear of it
    running = start_daemon({"limits": limits}, errors=["engine_lost", "model_failed"])
    with running.client() as client:
        client.load(MODEL)
    return running


def greedy(daemon: Daemon, prompt: str, tokens: int) -> list[int]:
    with djinn.Session(MODEL, address=daemon.address) as s:
        return s.generate(prompt, max_tokens=tokens, ignore_eos=True).token_ids


def next_engine(daemon: Daemon, after: int) -> int:
    """The pid of the engine that is ready after the one with pid `after`."""
    wait_for(lambda: (device := daemon.device()).state == "ready" and device.pid != after)
    return daemon.device().pid


async def lost(call: Awaitable[Any]) -> None:
    """The call fails, with EngineLost."""
    with pytest.raises(djinn.EngineLost, match="try again"):
        await call


async def read_on(stream: djinn.AsyncStream) -> None:
    async for _ in stream:
        pass


def test_during_generation(fragile: Daemon) -> None:
    expected = [greedy(fragile, prompt, BEFORE + AFTER) for prompt in PROMPTS]

    async def scenario() -> None:
        sessions = [await djinn.AsyncSession(MODEL, address=fragile.address).open() for _ in PROMPTS]
        for s, prompt in zip(sessions, PROMPTS, strict=True):
            await s.generate(prompt, max_tokens=BEFORE, ignore_eos=True)
        before = [await s.token_ids for s in sessions]

        streams = [s.stream(max_tokens=NO_END, ignore_eos=True) for s in sessions[1:]]
        waiting = asyncio.create_task(lost(sessions[0].generate(max_tokens=NO_END, ignore_eos=True)))
        for stream in streams:
            await anext(stream)
        callers = [waiting, *(asyncio.create_task(lost(read_on(stream))) for stream in streams)]
        dead = await asyncio.to_thread(fragile.kill_engine)
        await asyncio.gather(*callers)

        assert [await s.token_ids for s in sessions] == before  # as if the call had never been
        after = await asyncio.gather(*(s.generate(max_tokens=AFTER, ignore_eos=True) for s in sessions))
        for tokens, whole in zip(after, expected, strict=True):
            assert tokens.token_ids == whole[BEFORE:]
        for s in sessions:
            await s.close()
        assert not is_alive(dead)

    asyncio.run(scenario())
    with fragile.client() as client:
        status = client.status(check=True)
    assert (status.devices[0].restarts, status.integrity) == (1, [])
    assert len(fragile.shared_memory()) <= 2  # the next engine took over weights and pages


def test_while_idle_and_again_at_once(fragile: Daemon) -> None:
    whole = greedy(fragile, PROMPTS[0], BEFORE + 2 * AFTER)
    with djinn.Session(MODEL, address=fragile.address) as s:
        s.generate(PROMPTS[0], max_tokens=BEFORE, ignore_eos=True)
        next_engine(fragile, after=fragile.kill_engine())
        assert s.generate(max_tokens=AFTER, ignore_eos=True).token_ids == whole[BEFORE : BEFORE + AFTER]

        stream = s.stream(max_tokens=NO_END, ignore_eos=True)
        next(stream)
        fragile.kill_engine()
        with pytest.raises(djinn.EngineLost):
            list(stream)
        assert s.generate(max_tokens=AFTER, ignore_eos=True).token_ids == whole[BEFORE + AFTER :]  # waits for an engine
    assert fragile.device().restarts == 2


def test_while_a_model_is_loaded(fragile: Daemon) -> None:
    """Whoever waits for the model hears it; the model that was there comes back by itself."""
    loading = str(reduced_model("gpt2"))
    pid = fragile.device().pid
    with djinn.Session(MODEL, address=fragile.address) as s:
        s.forward([1, 2, 3])
        with Wire(fragile.address) as first, Wire(fragile.address) as second:
            os.kill(pid, signal.SIGSTOP)  # so that it does not come before both of them wait
            for wire in (first, second):
                wire.send(LoadModel(id=1, model=loading), Ping(id=2))
                assert wire.reply() == Done(id=2)
            os.kill(pid, signal.SIGCONT)
            assert isinstance(first.reply(), Progress)
            os.kill(pid, signal.SIGKILL)
            for wire in (first, second):
                while isinstance(told := wire.reply(), Progress):
                    pass
                assert isinstance(told, Failure) and told.code == "engine_lost"
        assert djinn.load(loading, address=fragile.address).state == "ready"
        assert s.forward([4]).shape[0] == 1
        assert s.token_ids == [1, 2, 3, 4]
    with fragile.client() as client:
        assert client.status(check=True).integrity == []
    assert len(fragile.shared_memory()) <= 4
