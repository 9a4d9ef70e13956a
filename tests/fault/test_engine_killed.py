"""The engine dies by SIGKILL: clients notice a delay at most, and their tokens are the same as without the death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    Done,
    Forward,
    Generate,
    Generated,
    LoadModel,
    Logits,
    ModelReply,
    Piece,
    Ping,
    Progress,
)
from tests.conftest import MODEL, DaemonStarter
from tests.support.checkpoint_files import tiny_with
from tests.support.daemon import Daemon, is_alive
from tests.support.models import reduced_model
from tests.support.served import Wire

PROMPTS = ["def fibonacci(", "class Tree:\n    def __init__(self", "import os\n\n", "for i in range("]
BEFORE, AFTER = 8, 40  # tokens of a session before and after a call
LONG = 150  # tokens


@pytest.fixture
def fragile(start_daemon: DaemonStarter) -> Daemon:
    """A daemon with an engine that the test kills. Each test has its own, because the delay before the next engine
    doubles with each death."""
    limits = {"engine_silence": "1h"}  # so that clients notice the death, and no silence
    running = start_daemon({"limits": limits}, errors=["engine_lost", "load_killed_engine"])
    with running.client() as client:
        client.load(MODEL)
    return running


def greedy(daemon: Daemon, prompt: str, tokens: int) -> list[int]:
    with djinn.Session(MODEL, address=daemon.address) as s:
        return s.generate(prompt, max_tokens=tokens, ignore_eos=True).token_ids


def killed_in_mid_stream(daemon: Daemon, calls: Sequence[dict[str, Any]], model: str = MODEL) -> list[djinn.Generated]:
    """Streams these calls, each on a session of its own, kills the engine when all have begun, and returns their
    results."""

    async def one(options: dict[str, Any], began: asyncio.Barrier) -> djinn.Generated:
        options = {"ignore_eos": True} | options
        async with djinn.AsyncSession(model, address=daemon.address) as s:
            stream = s.stream(options.pop("prompt"), **options)
            pieces = [await anext(stream)]
            await began.wait()
            pieces += [piece async for piece in stream]
            told = [token for piece in pieces for token in piece.token_ids]
            assert told == stream.result.token_ids == (await s.token_ids())[-len(told) :]
            return stream.result

    async def scenario() -> list[djinn.Generated]:
        began = asyncio.Barrier(len(calls) + 1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(options, began)) for options in calls]
            await began.wait()
            dead = await asyncio.to_thread(daemon.kill_engine)
        assert not is_alive(dead)
        return [task.result() for task in tasks]

    return asyncio.run(scenario())


def undisturbed(daemon: Daemon, options: dict[str, Any]) -> djinn.Generated:
    options = {"ignore_eos": True} | options
    with djinn.Session(MODEL, address=daemon.address) as s:
        return s.generate(options.pop("prompt"), **options)


@pytest.mark.smoke
def test_streams_continue_with_the_same_tokens(fragile: Daemon) -> None:
    calls: list[dict[str, Any]] = [
        {"prompt": PROMPTS[0], "max_tokens": LONG},
        {"prompt": PROMPTS[1], "max_tokens": LONG, "temperature": 0.8, "seed": 7},
        {"prompt": PROMPTS[2], "max_tokens": LONG, "temperature": 1.3, "top_p": 0.9, "seed": 8},
        {"prompt": PROMPTS[3], "max_tokens": LONG, "presence_penalty": 0.7, "repetition_penalty": 1.2},
        {"prompt": PROMPTS[1], "max_tokens": LONG, "min_tokens": LONG, "ignore_eos": False, "prompt_logprobs": 1}
        | {"frequency_penalty": 0.4, "logit_bias": {40: 2.0}},
        {"prompt": PROMPTS[0], "max_tokens": LONG, "logprobs": 2},
    ]
    expected = [undisturbed(fragile, options) for options in calls]
    found = killed_in_mid_stream(fragile, calls)
    for result, whole in zip(found, expected, strict=True):
        assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
        assert (result.usage.prompt_tokens, result.usage.generated_tokens) == (whole.usage.prompt_tokens, LONG)
    for scores, wanted in zip(found[-2].prompt_logprobs or (), expected[-2].prompt_logprobs or (), strict=True):
        assert (scores and [*scores.top]) == (wanted and [*wanted.top])
    assert len(found[-1].logprobs) == LONG
    for entry, whole_entry in zip(found[-1].logprobs, expected[-1].logprobs, strict=True):
        assert entry.token == pytest.approx(whole_entry.token, abs=1e-3)
    with fragile.client() as client:
        status = client.status(check=True)
    assert (status.devices[0].restarts, status.integrity) == (1, [])
    assert len(fragile.shared_memory()) <= 2  # the next engine took over weights and pages


def test_streams_with_a_text_worker_continue_too(fragile: Daemon, tmp_path: Path) -> None:
    """Their text is the same as that of the configured model, which has the same files."""
    folder = tiny_with(tmp_path / "theirs", lambda config: None)
    calls = [
        {"prompt": PROMPTS[0], "max_tokens": LONG},
        {"prompt": PROMPTS[1], "max_tokens": LONG, "temperature": 0.8, "seed": 7, "logprobs": 1, "token_bytes": True},
        {"prompt": PROMPTS[2], "max_tokens": LONG, "stop": ["no text has this"]},
    ]
    found = killed_in_mid_stream(fragile, calls, str(folder))
    for result, options in zip(found, calls, strict=True):
        whole = undisturbed(fragile, options)
        assert result.token_bytes == whole.token_bytes
        assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
        assert result.finish_reason == whole.finish_reason


def test_a_stop_string_across_the_death_ends_the_call(fragile: Daemon) -> None:
    """The stop string comes late in the text, and no part of it was sent before the death."""
    whole = undisturbed(fragile, {"prompt": PROMPTS[1], "max_tokens": LONG})
    stop = whole.text[-30:-10]
    calls = [{"prompt": PROMPTS[1], "max_tokens": LONG, "stop": [stop]}]
    (result,) = killed_in_mid_stream(fragile, calls)
    assert result.finish_reason == "stop"
    assert result.text == undisturbed(fragile, calls[0]).text == whole.text[: whole.text.index(stop)]


def test_sixteen_sessions_at_once(fragile: Daemon) -> None:
    calls = [
        {
            "prompt": f"{PROMPTS[number % 4]}{number}",
            "max_tokens": 80,
            "temperature": 0.5 * (number % 3),
            "seed": number,
        }
        for number in range(16)
    ]
    expected = [undisturbed(fragile, options).token_ids for options in calls]
    assert [result.token_ids for result in killed_in_mid_stream(fragile, calls)] == expected
    with fragile.client() as client:
        assert client.status(check=True).integrity == []


def test_before_the_first_token_and_while_idle(fragile: Daemon) -> None:
    whole = greedy(fragile, PROMPTS[0], BEFORE + AFTER)
    with djinn.Session(MODEL, address=fragile.address) as s:
        s.generate(PROMPTS[0], max_tokens=BEFORE, ignore_eos=True)
        pid = fragile.device().pid
        os.kill(pid, signal.SIGSTOP)  # so that it computes no step of the call
        with Wire(fragile.address) as wire:
            wire.send(Generate(id=1, session=s.id, max_tokens=AFTER, ignore_eos=True), Ping(id=2))
            assert wire.reply() == Done(id=2)
            os.kill(pid, signal.SIGKILL)
            reply = wire.reply()
            assert isinstance(reply, Generated) and reply.token_ids == whole[BEFORE:]
        fragile.kill_engine()
        s.truncate(len(s.token_ids()) - AFTER)
        assert s.generate(max_tokens=AFTER, ignore_eos=True).token_ids == whole[BEFORE:]
    assert fragile.device().restarts == 2


def test_logits_and_captured_activations(fragile: Daemon) -> None:
    prompt = list(range(100, 160))
    with djinn.Session(MODEL, address=fragile.address) as s:
        expected = s.forward(prompt).copy()
    with djinn.Session(MODEL, address=fragile.address) as s:
        pid = fragile.device().pid
        os.kill(pid, signal.SIGSTOP)
        with Wire(fragile.address) as wire:
            wire.send(Forward(id=1, session=s.id, token_ids=prompt), Ping(id=2))
            assert wire.reply() == Done(id=2)
            os.kill(pid, signal.SIGKILL)
            reply = wire.reply()
            assert isinstance(reply, Logits) and (reply.tokens, reply.vocab) == expected.shape
    request = Generate(
        id=3,
        session="",
        token_ids=prompt,
        max_tokens=LONG,
        ignore_eos=True,
        stream=True,
        capture=["blocks.1.hook_mlp_out"],
    )
    undisturbed, _ = captured(fragile, request, die=False)
    result, device = captured(fragile, request, die=True)
    assert result == undisturbed
    assert (device.restarts, len(result[0])) == (2, LONG)
    with fragile.client() as client:
        assert client.status(check=True).integrity == []


def captured(daemon: Daemon, request: Generate, die: bool) -> tuple[tuple[list[int], Any], djinn.DeviceInfo]:
    """Returns tokens and positions of a call that captures, and the device afterwards. `die`: kills the engine during
    it."""
    with djinn.Session(MODEL, address=daemon.address) as s, Wire(daemon.address) as wire:
        reply, tokens = wire.ask(msgspec.structs.replace(request, session=s.id)), []
        if die:
            daemon.kill_engine()
        while isinstance(reply, Piece):
            tokens += reply.token_ids
            reply = wire.reply()
        assert isinstance(reply, Generated) and reply.captured is not None, reply
        return (tokens + reply.token_ids, (reply.captured.first, reply.captured.positions)), daemon.device()


def test_the_engine_dies_during_a_load(fragile: Daemon) -> None:
    """The load continues on the next engine, for all requests that wait for it. The other model comes back by
    itself."""
    loading = str(reduced_model("gpt2"))
    pid = fragile.device().pid
    with djinn.Session(MODEL, address=fragile.address) as s:
        s.forward([1, 2, 3])
        with Wire(fragile.address) as first, Wire(fragile.address) as second:
            os.kill(pid, signal.SIGSTOP)  # so that the death does not come before both of them wait
            for wire in (first, second):
                wire.send(LoadModel(id=1, model=loading), Ping(id=2))
                assert wire.reply() == Done(id=2)
            os.kill(pid, signal.SIGCONT)
            assert isinstance(first.reply(), Progress)
            os.kill(pid, signal.SIGKILL)
            for wire in (first, second):
                while isinstance(told := wire.reply(), Progress):
                    pass
                assert isinstance(told, ModelReply) and told.model.state == "ready"
        assert s.forward([4]).shape[0] == 1
        assert s.token_ids() == [1, 2, 3, 4]
    with fragile.client() as client:
        assert client.status(check=True).integrity == []
    assert len(fragile.shared_memory()) <= 4
