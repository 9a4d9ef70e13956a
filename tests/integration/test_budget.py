"""The budget changes while sessions generate: no session loses a token, although blocks stream meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon, wait_for
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-3.1")
MODEL = str(FOLDER)
TOKENS = 48
TOTAL = 1 << 30


@pytest.fixture
def daemon(start_daemon: DaemonStarter) -> Daemon:
    return start_daemon()


@pytest.mark.long
def test_sixteen_sessions_under_a_budget_that_shrinks_and_grows(daemon: Daemon) -> None:
    prompts = [random_prompt(length, 512, seed) for seed, length in enumerate(range(5, 165, 10))]
    with daemon.client() as client:
        assert client.load(MODEL).blocks_streamed == 0
        with pytest.raises(djinn.OutOfMemory, match="is too small") as told:
            client.set_budget(1)
        least = told.value.data["needed"]

    async def session(prompt: list[int]) -> list[int]:
        async with djinn.AsyncSession(MODEL, address=daemon.address) as s:
            reply = await s.generate(prompt, max_tokens=TOKENS, ignore_eos=True)
            return list(reply.token_ids)

    refused: list[tuple[int, int]] = []

    async def unrest(running: asyncio.Future[list[list[int]]]) -> int:
        """Changes the budget until all sessions are done. Returns how many budgets made blocks stream."""
        chance, streamed = random.Random(0), 0
        with daemon.client() as client:
            while not running.done():
                total = chance.choice([TOTAL, least + (2 << 20), least + chance.randint(1 << 20, 8 << 20)])
                try:
                    reply = await asyncio.to_thread(client.set_budget, total)
                except djinn.OutOfMemory as error:  # a session is longer than when the figure was computed
                    refused.append((total, error.data["needed"]))
                    continue
                assert reply.budget_bytes == total >= reply.used_bytes
                (model,) = reply.models
                streamed += model.blocks_streamed > 0
        return streamed

    async def together() -> tuple[list[list[int]], int]:
        running = asyncio.ensure_future(asyncio.gather(*[session(prompt) for prompt in prompts]))
        streamed = await unrest(running)
        return await running, streamed

    tokens, streamed = asyncio.run(together())
    assert streamed > 0
    assert all(total < needed for total, needed in refused)
    for prompt, got in zip(prompts, tokens, strict=True):
        assert got == reference.greedy(FOLDER, prompt, TOKENS, got)
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def test_a_model_streams_from_the_start_with_the_memory_that_its_refusal_names(start_daemon: DaemonStarter) -> None:
    prompt = random_prompt(40, 512, 1)
    daemon = start_daemon(errors=["model_failed"])
    with daemon.client() as client:
        client.set_budget(1 << 20)
        with pytest.raises(djinn.OutOfMemory, match="at least") as told:
            client.load(MODEL)
        client.set_budget(told.value.data["needed"])
        model = client.load(MODEL)
        assert model.blocks_streamed == model.blocks == 4
        with djinn.Session(MODEL, address=daemon.address) as s:
            tokens = s.generate(prompt, max_tokens=TOKENS, ignore_eos=True).token_ids
        assert list(tokens) == reference.greedy(FOLDER, prompt, TOKENS)
        status = client.status(check=True)
        assert status.integrity == [] and status.devices[0].used_bytes == told.value.data["needed"]


@pytest.mark.long
def test_a_new_engine_has_the_budget_that_was_set_last(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon(errors=["engine_lost"])
    with daemon.client() as client:
        client.load(MODEL)
        with pytest.raises(djinn.OutOfMemory) as told:
            client.set_budget(1)
        total = told.value.data["needed"] + (1 << 20)
        client.set_budget(total)
        before = daemon.device().pid
        daemon.kill_engine()
        wait_for(lambda: (device := daemon.device()).state == "ready" and device.pid != before)
        with djinn.Session(MODEL, address=daemon.address) as s:
            prompt = random_prompt(40, 512, 1)
            tokens = s.generate(prompt, max_tokens=TOKENS, ignore_eos=True).token_ids
        assert list(tokens) == reference.greedy(FOLDER, prompt, TOKENS)
        assert daemon.device().budget_bytes == total
