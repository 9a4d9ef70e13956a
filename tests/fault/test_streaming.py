"""Blocks with copies that come late or fail: a step without a block gives an error and no token, and the next is
right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from djinn_client.protocol import Placing
from djinnd import messages
from tests.support import reference
from tests.support.engine_thread import EngineThread
from tests.support.loaded import MEMORY, random_prompt
from tests.support.models import reduced_model
from tests.support.parameters import long_except
from tests.support.troubled import TroubledDevice

pytestmark = pytest.mark.smoke

FOLDER = reduced_model("llama-3.1")
PLACINGS = [
    Placing(resident=0, slots=1),
    Placing(resident=0, slots=3),
    Placing(resident=1, slots=2),
    Placing(resident=2, prefetch=False),
]


@pytest.fixture
def device() -> TroubledDevice:
    return TroubledDevice(MEMORY)


@pytest.fixture
def engine(device: TroubledDevice) -> Iterator[EngineThread]:
    with EngineThread(device) as engine:
        yield engine
        device.let_go()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, 512, seed)


def greedy(tokens: list[int], count: int) -> list[int]:
    return reference.greedy(FOLDER, tokens, count)


def fail(engine: EngineThread, device: TroubledDevice, streamed: int) -> None:
    """Makes the next copy of the streamed block of this number fail, counted from the first."""
    runner = engine.runner()
    device.fail(runner.weights.store.host(runner.places.streamed[streamed]))


@pytest.mark.parametrize("placing", PLACINGS, ids=str)
def test_a_late_block_is_waited_for(engine: EngineThread, device: TroubledDevice, placing: Placing) -> None:
    engine.loaded(FOLDER, placing=placing)
    engine.open("s")
    device.delay = 0.005
    assert engine.outcome(engine.run("s", prompt(30), 6))[0] == greedy(prompt(30), 6)


def test_no_token_comes_while_a_block_is_on_its_way(engine: EngineThread, device: TroubledDevice) -> None:
    engine.loaded(FOLDER, placing=Placing(resident=0, slots=2))
    engine.open("s")
    device.synchronize()
    device.gate.clear()
    request = engine.run("s", prompt(30), 6)
    engine.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        engine.receive()
    engine.socket.settimeout(60.0)
    device.gate.set()
    assert engine.outcome(request)[0] == greedy(prompt(30), 6)


@pytest.mark.parametrize("streamed", [0, 1, -1])
@pytest.mark.parametrize("placing", long_except(PLACINGS[:1], PLACINGS), ids=str)
def test_a_step_without_its_block_fails_and_the_next_one_is_right(
    engine: EngineThread, device: TroubledDevice, placing: Placing, streamed: int
) -> None:
    engine.loaded(FOLDER, placing=placing)
    names = [f"s{n}" for n in range(3)]
    for name in names:
        engine.open(name)
    before = [engine.run_message(name, prompt(9 + n, n), 4) for n, name in enumerate(names)]
    engine.send(*before)
    spoken = [engine_tokens for engine_tokens, _ in engine.outcomes([run.request for run in before]).values()]
    fail(engine, device, streamed)
    runs = [engine.run_message(name, prompt(5, 7), 12) for name in names]
    engine.send(*runs)
    outcomes = engine.outcomes([run.request for run in runs])
    failed = [run.request for run in runs if isinstance(outcomes[run.request][1], messages.Failed)]
    assert device.failed == 1 and failed
    for n, run in enumerate(runs):
        tokens, reply = outcomes[run.request]
        text = prompt(9 + n, n) + spoken[n] + prompt(5, 7)
        assert tokens == greedy(text, 12)[: len(tokens)]  # of the steps that had their blocks
        if isinstance(reply, messages.Failed):
            assert "the step failed" in reply.message and "the bus has caught fire" in reply.message
    again = [engine.run_message(names[n], prompt(5, 7), 6) for n, run in enumerate(runs) if run.request in failed]
    engine.send(*again)
    for run, (tokens, reply) in zip(again, engine.outcomes([run.request for run in again]).values(), strict=True):
        n = names.index(run.session)
        assert isinstance(reply, messages.Finished)
        assert tokens == greedy(prompt(9 + n, n) + spoken[n] + prompt(5, 7), 6)
    engine.report()


def test_repeatedly_failing_copies_never_stop_the_engine(engine: EngineThread, device: TroubledDevice) -> None:
    engine.loaded(FOLDER, placing=Placing(resident=1, slots=2))
    engine.open("s")
    for turn in range(6):
        fail(engine, device, turn % 3)
        _, reply = engine.outcome(engine.run("s", prompt(20), 8))
        assert isinstance(reply, messages.Failed), turn
    tokens, _ = engine.outcome(engine.run("s", prompt(20), 8))
    assert tokens == greedy(prompt(20), 8)
    engine.report()


def test_a_load_with_failing_copies_is_refused_and_the_next_one_is_served(
    engine: EngineThread, device: TroubledDevice
) -> None:
    arenas: list[messages.NeedArena] = []

    def grant(need: messages.NeedArena) -> messages.ArenaReady:
        arenas.append(need)
        device.fail_any = 1
        return engine.grant(need)

    reply = engine.load(FOLDER, placing=Placing(resident=0), grant=grant)
    assert isinstance(reply, messages.Failed) and "the bus has caught fire" in reply.message
    assert engine.report().used_bytes == 0
    engine.loaded(FOLDER, placing=Placing(resident=0))
    engine.open("s")
    assert engine.outcome(engine.run("s", prompt(20), 4))[0] == greedy(prompt(20), 4)
