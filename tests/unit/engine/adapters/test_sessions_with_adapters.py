"""Sessions with adapters on a real engine give what the merged checkpoints give, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from djinn_client.protocol import Placing
from djinnd import messages
from tests.support import reference
from tests.support.adapters import KINDS, load_adapter, loaded_adapter, merged, open_with, write_adapter
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

MODEL = reduced_model("llama-2")
NEW = 6


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), MODEL, seed, **kind) for seed, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def checkpoints(adapters: list[Path]) -> list[Path]:
    """The merged checkpoint of each adapter, and the model without one."""
    return [*(merged(folder.with_name(f"merged-{folder.name}"), MODEL, folder) for folder in adapters), MODEL]


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        engine.loaded(MODEL)
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, 512, seed)


def test_sixteen_sessions_with_five_adapters_and_none_in_one_batch(
    engine: EngineThread, adapters: list[Path], checkpoints: list[Path]
) -> None:
    identities = [*(load_adapter(engine, folder) for folder in adapters), b""]
    prompts = {n: prompt(3 + 7 * n, n) for n in range(16)}
    runs = {}
    for n, tokens in prompts.items():
        open_with(engine, f"s{n}", identities[n % 6])
        runs[n] = engine.run_message(f"s{n}", tokens, NEW)
    engine.send(*runs.values())
    outcomes = engine.outcomes([run.request for run in runs.values()])
    for n in sorted(prompts, key=lambda each: each % 6):  # the reference keeps one model in memory
        told, _ = outcomes[runs[n].request]
        assert told == reference.greedy(checkpoints[n % 6], prompts[n], NEW, told), n
    engine.report()


def test_pages_of_one_adapter_are_found_by_its_own_sessions_only(engine: EngineThread, adapters: list[Path]) -> None:
    first, second = (load_adapter(engine, folder) for folder in adapters[:2])
    tokens = prompt(2 * engine.runner().plan.page_size + 1)
    computed = []
    for n, identity in enumerate((first, second, b"", first, b"")):
        open_with(engine, f"s{n}", identity)
        _, reply = engine.outcome(engine.run(f"s{n}", tokens, 1))
        assert isinstance(reply, messages.Finished)
        computed.append(reply.computed)
    assert computed == [len(tokens)] * 3 + [1, 1]


def test_a_fork_and_a_session_of_an_earlier_engine_have_their_adapter(
    engine: EngineThread, adapters: list[Path], checkpoints: list[Path]
) -> None:
    identity = load_adapter(engine, adapters[0])
    open_with(engine, "s", identity, prompt(20))
    engine.send(messages.Fork("f", "s", "agent"))
    for session in ("s", "f"):
        told, _ = engine.outcome(engine.run(session, [3], NEW))
        assert told == reference.greedy(checkpoints[0], [*prompt(20), 3], NEW, told)


def test_the_longest_unused_adapter_gives_way(engine: EngineThread, adapters: list[Path]) -> None:
    residency = engine.runner().adapters
    residency._free = residency._free[:2]
    identities = [load_adapter(engine, folder) for folder in adapters[:3]]
    resident = []
    for n, of in enumerate((0, 1, 0, 2, 1)):
        open_with(engine, f"s{n}", identities[of])
        engine.outcome(engine.run(f"s{n}", prompt(4), 1))
        resident.append({identities.index(each) for each in residency.resident})
    assert resident == [{0}, {0, 1}, {0, 1}, {0, 2}, {1, 2}]


def test_an_adapter_in_use_stays(engine: EngineThread, adapters: list[Path]) -> None:
    residency = engine.runner().adapters
    residency._free = residency._free[:1]
    used, other = (load_adapter(engine, folder) for folder in adapters[:2])
    open_with(engine, "s", used)
    open_with(engine, "t", other)
    held = engine.run_message("s", prompt(4), 4)
    engine.send(held, messages.Hold(held.request, True))
    _, reply = engine.outcome(engine.run("t", prompt(4), 1))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory" and "in use" in reply.message
    engine.send(messages.Hold(held.request, False))
    engine.outcome(held.request)
    _, reply = engine.outcome(engine.run("t", prompt(4), 1))
    assert isinstance(reply, messages.Finished)


def test_without_room_on_the_device_the_run_is_refused_with_the_figures(
    engine: EngineThread, adapters: list[Path]
) -> None:
    identity = load_adapter(engine, adapters[0])
    open_with(engine, "s", identity)
    budget = engine.device.budget
    budget.reserve("everything", budget.free)
    _, reply = engine.outcome(engine.run("s", prompt(4), 1))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory" and "less KV memory" in reply.message
    budget.release("everything")
    _, reply = engine.outcome(engine.run("s", prompt(4), 1))
    assert isinstance(reply, messages.Finished)
    engine.report()


def test_a_load_sets_memory_aside_for_adapters(adapters: list[Path]) -> None:
    """They come and go although nothing else is free, and the room is as large as before when they have left."""
    with EngineThread() as engine:
        engine.loaded(MODEL, placing=Placing(adapter_bytes=64 << 20))
        identities = [load_adapter(engine, folder) for folder in adapters[:3]]
        runner, budget = engine.runner(), engine.device.budget
        sizes = [runner.adapters._images[identity].memory.nbytes for identity in identities]
        runner.adapters._room = room = max(sizes[0] + sizes[1], sizes[2])  # no more than two at once
        budget.change("room for adapters of m", room)
        before = engine.report().used_bytes
        budget.reserve("everything", budget.free)
        for n, of in enumerate((0, 1, 2, 0)):
            open_with(engine, f"s{n}", identities[of])
            _, reply = engine.outcome(engine.run(f"s{n}", prompt(4), 1))
            assert isinstance(reply, messages.Finished) and budget.free == 0
            assert runner.adapters.nbytes == room
        for identity in identities:
            engine.send(messages.DropAdapter("m", identity))
        budget.release("everything")
        assert engine.report().used_bytes == before


def test_adapters_beyond_the_room_take_what_the_model_leaves(adapters: list[Path]) -> None:
    with EngineThread() as engine:
        engine.loaded(MODEL, placing=Placing(adapter_bytes=1))
        before = engine.report().used_bytes
        identity = load_adapter(engine, adapters[0])
        open_with(engine, "s", identity)
        _, reply = engine.outcome(engine.run("s", prompt(4), 1))
        assert isinstance(reply, messages.Finished)
        assert engine.report().used_bytes == before - 1 + engine.runner().adapters.nbytes
        engine.send(messages.DropAdapter("m", identity))
        assert engine.report().used_bytes == before


def test_a_dropped_adapter_gives_its_memory_back_and_is_missed(engine: EngineThread, adapters: list[Path]) -> None:
    before = engine.report().used_bytes
    identity = load_adapter(engine, adapters[0])
    open_with(engine, "s", identity)
    engine.outcome(engine.run("s", prompt(4), 1))
    assert engine.report().used_bytes > before
    engine.send(messages.DropAdapter("m", identity))
    assert engine.report().used_bytes == before
    _, reply = engine.outcome(engine.run("s", [5], 1))
    assert isinstance(reply, messages.Failed) and reply.code == "adapter_not_found"


def test_an_adapter_of_another_model_is_refused(engine: EngineThread, tmp_path: Path) -> None:
    answer = loaded_adapter(engine, write_adapter(tmp_path / "other", reduced_model("qwen3")))
    assert isinstance(answer, messages.Failed) and answer.code == "model_rejected"
    engine.report()
