"""Several models on one device: idle ones sleep, and others use their memory. When several are busy, none starves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import ModelInfo
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon, wait_for
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model, tiny_model

FIRST, SECOND = tiny_model(), reduced_model("qwen3")
PROMPT = random_prompt(300, 500, 3)  # two pages of djinn-tiny
OTHER = [300, 20, 101, 7, 55, 430, 12]
NEW = 8
SOON = 0.2  # seconds of keep_alive
MOST = 700 << 20  # bytes of pages: only one of two models with so many fits


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    models = {
        "first": {"path": str(FIRST), "host_kv": "32MiB"},
        "second": {"path": str(SECOND), "host_kv": 0},
        "frugal": {"path": str(FIRST), "host_kv": 0, "keep_host": False, "keep_alive": f"{SOON}s"},
    }
    with DaemonStarter() as start:
        yield start({"models": models}, errors=["model_failed"])


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    """A daemon without models; each test leaves it so."""
    yield running
    with running.client() as client:
        for model in client.models():
            client.unload(model.name, force=True)
        status = client.status(check=True)
        assert (status.devices[0].used_bytes, status.arena_bytes, status.integrity) == (0, 0, [])


def info(client: djinn.Client, name: str) -> ModelInfo:
    return next(model for model in client.models() if model.name == name)


def wait_for_tiers(client: djinn.Client, name: str) -> None:
    wait_for(lambda: info(client, name).host_pages)


def wait_until_asleep(client: djinn.Client, name: str) -> None:
    """Waits until the model sleeps and has freed its memory."""

    def is_asleep() -> bool:
        status = client.status()  # both from one reply: the memory is freed a moment after the model has fallen asleep
        states = {model.name: model.state for model in status.models}
        return states[name] == "asleep" and bool(status.devices[0].used_bytes) == ("ready" in states.values())

    wait_for(is_asleep)


def test_a_model_sleeps_and_another_one_has_its_memory(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("first", kv_bytes=MOST)
        wait_for_tiers(client, "first")
        s = djinn.Session("first", address=daemon.address)
        tokens = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
        with pytest.raises(djinn.OutOfMemory, match="unload a model"):
            client.load("second", kv_bytes=MOST)

        client.load("first", keep_alive_s=SOON)
        wait_until_asleep(client, "first")
        assert client.status().devices[0].used_bytes == 0
        assert client.status(check=True).integrity == []
        client.load("second", kv_bytes=MOST)
        with djinn.Session("second", address=daemon.address) as other:
            assert other.generate(OTHER, max_tokens=4, ignore_eos=True).token_ids == reference.greedy(SECOND, OTHER, 4)
        with pytest.raises(djinn.OutOfMemory):  # the other model has no keep_alive, so it may not be put to sleep
            s.generate(max_tokens=NEW, ignore_eos=True)
        assert info(client, "first").state == "asleep" and info(client, "second").state == "ready"

        client.load("second", keep_alive_s=SOON)
        wait_until_asleep(client, "second")
        read = daemon.log.count("checkpoint_read model=first")
        answer = s.generate(max_tokens=NEW, ignore_eos=True)
        assert [*tokens, *answer.token_ids] == reference.greedy(FIRST, PROMPT, 2 * NEW)
        assert answer.usage.computed_tokens == 1, "its pages must have been on the host"
        assert daemon.log.count("checkpoint_read model=first") == read
        s.close()


def test_sessions_of_a_sleeping_model_can_be_used_without_waking_it(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client, djinn.Session("first", address=daemon.address) as s:
        wait_for_tiers(client, "first")
        tokens = [*PROMPT, *s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids]
        client.load("first", keep_alive_s=SOON)
        wait_until_asleep(client, "first")
        loads = daemon.log.count("model_ready model=first")
        s.signal("IO_WAIT", expected_s=0.1)
        s.signal("COMPUTE")
        with s.fork() as fork, s.fork() as shorter:
            shorter.truncate(290)
            assert (fork.token_ids(), shorter.token_ids()) == (tokens, tokens[:290])
            fork.pause()
            fork.unpause()
            s.save(tmp_path / "s.djinn", kv=False)
            assert {each.state for each in client.sessions()} == {"idle"}
            assert daemon.log.count("model_ready model=first") == loads, "none of this may count as a call"
            for each in (shorter, fork, s):
                prompt = each.token_ids()
                answer = each.generate([5], max_tokens=NEW, ignore_eos=True)
                assert answer.token_ids == reference.greedy(FIRST, [*prompt, 5], NEW)
        with djinn.Session.load(tmp_path / "s.djinn", address=daemon.address) as saved:
            assert saved.token_ids() == tokens
        assert client.status(check=True).integrity == []


@pytest.mark.long
def test_a_model_without_a_host_copy_sleeps_too(daemon: Daemon) -> None:
    with daemon.client() as client, djinn.Session("frugal", address=daemon.address) as s:
        tokens = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
        wait_until_asleep(client, "frugal")
        read = daemon.log.count("checkpoint_read model=frugal")
        tokens += s.generate(max_tokens=NEW, ignore_eos=True).token_ids
        assert tokens == reference.greedy(FIRST, PROMPT, 2 * NEW)
        assert daemon.log.count("checkpoint_read model=frugal") == read + 1


@pytest.mark.long
def test_kv_of_a_client_keeps_its_model_awake(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("first", keep_alive_s=SOON)
        with djinn.Session("first", address=daemon.address) as s:
            s.generate(PROMPT, max_tokens=NEW, ignore_eos=True)
            kv = s.kv()
        with djinn.Session.from_kv("first", kv.tokens, kv, address=daemon.address) as given:
            wait_for(lambda: info(client, "first").idle_s > 2 * SOON)
            assert info(client, "first").state == "ready"
            before = given.generate([5], max_tokens=NEW, ignore_eos=True).token_ids
            assert before == reference.greedy(FIRST, [*kv.tokens, 5], NEW)
        wait_until_asleep(client, "first")


# --- two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_switching_between_two_models_starves_neither(daemon: Daemon) -> None:
    """Eight endless sessions run on one model. Calls to the other are served meanwhile, and the eight continue."""
    with daemon.client() as client:
        first, second = (client.load(name, kv_bytes=128 << 20) for name in ("first", "second"))
        assert first.kv_bytes + second.kv_bytes < client.status().devices[0].used_bytes <= 1 << 30

    async def scenario(busy: str, folder: Path) -> None:
        sessions = [await djinn.AsyncSession(busy, address=daemon.address).open() for _ in range(8)]
        streams = [s.stream(OTHER, max_tokens=1500, ignore_eos=True) for s in sessions]
        counts = [0] * len(streams)

        async def count(index: int) -> None:
            async for piece in streams[index]:
                counts[index] += len(piece.token_ids)

        readers = [asyncio.create_task(count(index)) for index in range(len(streams))]
        while min(counts) < 2:
            await asyncio.sleep(0.001)
        before = sum(counts)
        async with djinn.AsyncSession("second" if busy == "first" else "first", address=daemon.address) as s:
            answer = await s.generate(OTHER, max_tokens=24, ignore_eos=True)
        during, are_done = sum(counts) - before, [reader.done() for reader in readers]
        assert answer.token_ids == reference.greedy(folder, OTHER, 24)
        assert not any(are_done) and during >= 24, (are_done, during)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        for s in sessions:
            await s.close()

    asyncio.run(scenario("first", SECOND))
    asyncio.run(scenario("second", FIRST))
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def test_memory_of_an_unloaded_model_is_used_only_after_a_change_of_budget(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("second")
        before = client.load("first")
        client.unload("second")
        assert info(client, "first").pages == before.pages
        client.set_budget(1000 << 20)
        (first,) = client.set_budget(1 << 30).models
        assert first.pages > before.pages
        client.unload("first")
        client.load("second")
        again = client.load("first")
        client.unload("second")
        client.unload("first")
        assert client.load("first").pages > again.pages == before.pages
