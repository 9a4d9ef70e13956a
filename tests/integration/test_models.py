"""Models on one device: sharing memory, progress of loads, and freed memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.protocol import Done, LoadModel, ModelReply, Ping, Progress
from tests.conftest import MODEL, DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon, descriptors_of
from tests.support.models import reduced_model, tiny_model
from tests.support.served import Wire

PROMPT = [300, 20, 101, 7, 55, 430, 12]


@pytest.fixture(scope="module")
def empty() -> Iterator[Daemon]:
    """A daemon without models; each test leaves it so."""
    with DaemonStarter() as start:
        yield start(errors=["model_failed"])


def device_bytes(daemon: Daemon) -> int:
    return daemon.device().used_bytes


def test_two_models_share_the_budget(empty: Daemon) -> None:
    folders = [tiny_model(), reduced_model("qwen3")]
    with empty.client() as client:
        infos = [client.load(str(folder), kv_bytes=64 << 20) for folder in folders]
        status = client.status(check=True)
        device = status.devices[0]
        assert sum(info.weight_bytes + info.kv_bytes for info in infos) < device.used_bytes <= device.budget_bytes
        assert status.integrity == []
        assert status.arena_bytes > 0

        async def one(folder: Path) -> list[int]:
            async with djinn.AsyncSession(str(folder), address=empty.address) as s:
                return (await s.generate(PROMPT, max_tokens=48, ignore_eos=True)).token_ids

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*(one(folder) for folder in folders for _ in range(4)))

        answers = asyncio.run(all_of_them())
        for place, folder in enumerate(folders):
            expected = reference.greedy(folder, PROMPT, 48, answers[4 * place])
            assert answers[4 * place : 4 * place + 4] == [expected] * 4

        for folder in folders:
            client.unload(str(folder))
        status = client.status(check=True)
        assert (status.devices[0].used_bytes, status.arena_bytes, status.integrity) == (0, 0, [])
    assert empty.shared_memory() == []


def test_a_second_model_without_room_is_refused(empty: Daemon) -> None:
    other = str(reduced_model("qwen3"))
    with empty.client() as client:
        client.load(MODEL, kv_bytes=600 << 20)
        used = device_bytes(empty)
        with pytest.raises(djinn.OutOfMemory, match=r"of the budget of 1\.00 GiB is free: .*unload a model"):
            client.load(other, kv_bytes=500 << 20)
        assert device_bytes(empty) == used
        client.unload(MODEL)
        client.load(other, kv_bytes=500 << 20)
        client.unload(other)


def test_all_requests_that_wait_for_a_model_see_its_progress(empty: Daemon) -> None:
    engine = empty.device().pid
    before = empty.log.count(f"model_ready model={MODEL} ")
    with Wire(empty.address) as first, Wire(empty.address) as second, Wire(empty.address) as third:
        waiting = [first, second, third]
        os.kill(engine, signal.SIGSTOP)  # so that the load does not end before all of them wait
        try:
            for wire in waiting:
                wire.send(LoadModel(id=1, model=MODEL), Ping(id=2))
                assert wire.reply() == Done(id=2)  # so the request before it was received
        finally:
            os.kill(engine, signal.SIGCONT)
        told = [until_the_end(wire) for wire in waiting]
    for progress, last in told:
        assert isinstance(last, ModelReply)
        assert last.model.state == "ready"
        measured = [message for message in progress if message.total]
        assert measured
        assert all(message.model == MODEL and 0 <= message.done <= message.total for message in measured)
        assert measured[-1].done == measured[-1].total
        done = [(message.stage, message.done) for message in measured]
        assert all(after >= before for (stage, before), (next_, after) in pairwise(done) if stage == next_)
    assert empty.log.count(f"model_ready model={MODEL} ") == before + 1
    djinn.unload(MODEL, address=empty.address)


def until_the_end(wire: Wire) -> tuple[list[Progress], Any]:
    progress: list[Progress] = []
    while isinstance(message := wire.reply(), Progress):
        progress.append(message)
    return progress, message


def test_sessions_keep_a_model_unless_it_is_forced_out(empty: Daemon) -> None:
    with empty.client() as client:
        s = djinn.Session(MODEL, address=empty.address)
        stream = s.stream("x = ", max_tokens=1900, ignore_eos=True)
        next(stream)
        with pytest.raises(djinn.InvalidRequest, match="1 sessions use djinn-tiny"):
            client.unload(MODEL)
        client.unload(MODEL, force=True)
        for _ in stream:
            pass
        assert stream.result.finish_reason == "cancelled"
        with pytest.raises(djinn.SessionNotFound):
            s.generate("x")
        s.close()
        assert device_bytes(empty) == 0
        assert client.status(check=True).integrity == []


def test_the_engine_keeps_nothing_open_for_an_unloaded_model(start_daemon: DaemonStarter) -> None:
    """Neither shared memory nor page files: open ones would take memory until a garbage collection."""
    model = {"path": str(reduced_model("llama-2")), "host_kv": "8MiB", "disk_kv": "8MiB"}
    daemon = start_daemon({"models": {"m": model}})

    def held() -> list[str]:
        names = descriptors_of(daemon.device().pid)
        return [name for name in names if name.startswith("/dev/shm/") or "/pages/" in name]

    with djinn.Session("m", address=daemon.address) as session:
        session.generate(list(range(100)), max_tokens=4)
        session.pause("disk")
    assert len(held()) >= 4
    djinn.unload("m", address=daemon.address)
    assert held() == []


def test_loading_an_unloaded_model_again(empty: Daemon) -> None:
    with empty.client() as client:
        for _ in range(3):
            with djinn.Session(MODEL, address=empty.address) as s:
                assert s.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids == reference.greedy(
                    tiny_model(), PROMPT, 4
                )
            client.unload(MODEL)
            assert (device_bytes(empty), empty.shared_memory()) == (0, [])
