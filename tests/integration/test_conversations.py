"""Programs that do not know sessions: the daemon finds their session, and computes only new tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.arguments.options import GenerateOptions, build
from djinn_client.protocol import Conversation, Generate, Generated
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.conversations import Program
from tests.support.daemon import Daemon

LIMITS = {"conversations_per_user": 4, "sessions_per_user": 8}  # fewer than inputs of an embedding that run together


@pytest.fixture(scope="module")
def talkative() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start({"limits": LIMITS})


@pytest.fixture
def program(talkative: Daemon) -> Iterator[Program]:
    program = Program(talkative.address)
    yield program
    program.close()


def page_size(daemon: Daemon) -> int:
    with daemon.client() as client:
        return max(model.page_size for model in client.models())


def turn(number: int, size: int = 12) -> list[int]:
    return [(number * 31 + place * 7) % 200 + 1 for place in range(size)]


def test_ten_turns_compute_only_new_tokens_and_continue_after_a_restart(talkative: Daemon) -> None:
    """Two conversations in turns, one with a key and one without."""
    programs = {key: Program(talkative.address) for key in ("", "chat-1")}
    replies: dict[str, list[Generated]] = {key: [] for key in programs}
    for number in range(10):
        if number == 5:
            restart_under(talkative, *programs.values())
        for key, program in programs.items():
            new = turn(number + 100 * len(key), size=80)
            reply = program.say(new, key=key)
            replies[key].append(reply)
            assert reply.usage.prompt_tokens == len(program.transcript) - len(reply.token_ids)
            page = page_size(talkative) if number == 5 else 0  # full pages stay on the host
            assert reply.usage.computed_tokens <= len(new) + 1 + page
            assert reply.usage.cached_tokens == reply.usage.prompt_tokens - reply.usage.computed_tokens
    for key, program in programs.items():
        assert len({reply.session for reply in replies[key]}) == 1
        with djinn.Session.attach(replies[key][0].session, address=talkative.address) as kept:
            assert kept.token_ids() == program.transcript
        last = replies[key][-1].token_ids
        with djinn.Session(MODEL, address=talkative.address) as whole:
            told = whole.generate(program.transcript[: -len(last)], max_tokens=8, ignore_eos=True, temperature=0)
            assert told.token_ids == last
        program.close()


def test_kept_sessions_do_not_keep_a_model_loaded(talkative: Daemon, program: Program) -> None:
    program.say(turn(8))
    with talkative.client() as client:
        client.unload(MODEL)
        assert [info for info in client.sessions() if info.state == "kept"] == []
    assert program.say(turn(8)).usage.cached_tokens == 0


def restart_under(daemon: Daemon, *programs: Program) -> None:
    for program in programs:
        program.close()
    with daemon.client() as client:
        restart(client, warm=True)
    for program in programs:
        program.connection = Program(daemon.address).connection


def test_embeddings_are_pooled_from_the_final_norm(talkative: Daemon) -> None:
    texts = ["def fibonacci(n):", "import os", "x"] * 7  # more than run at once
    with djinn.Session(MODEL, address=talkative.address) as s:
        captured = s.capture("ln_final.hook_normalized").run(texts[0])
        rows = np.asarray(captured["ln_final.hook_normalized"], np.float32)[0]
        tokens = s.token_ids()
    mean = djinn.embed(MODEL, texts, normalize=False, address=talkative.address)
    assert (len(mean.tokens), mean.tokens[0], mean.pooling) == (len(texts), len(tokens), "mean")
    np.testing.assert_allclose(np.asarray(mean)[0], rows.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(np.asarray(mean)[3], np.asarray(mean)[0], atol=1e-5)

    async def last_rows() -> djinn.Embeddings:
        async with djinn.AsyncClient(talkative.address) as client:
            return await client.embed(MODEL, [tokens], pooling="last")

    last = asyncio.run(last_rows())
    np.testing.assert_allclose(np.asarray(last)[0], rows[-1] / np.linalg.norm(rows[-1]), atol=1e-5)
    with talkative.client() as client:
        assert [info for info in client.sessions() if info.state not in ("kept", "detached")] == []
        assert client.status(check=True).integrity == []
    with pytest.raises(djinn.PromptTooLong):
        djinn.embed(MODEL, ["a", "b c " * 40000], address=talkative.address)
    with talkative.client() as client:
        assert client.status(check=True).integrity == []


def test_a_record_can_be_continued_wherever_its_session_is(talkative: Daemon, program: Program) -> None:
    first = program.say(turn(3, size=40))
    with talkative.client() as client:
        assert client.keep_record(first.session, b"mine", name="resp_1") == "resp_1"
    point, new = list(program.transcript), turn(4)
    onward = program.generate(new, after="resp_1")
    assert (onward.session, onward.usage.prompt_tokens) == (first.session, len(point) + len(new))
    assert onward.usage.computed_tokens <= len(new) + 1
    other = turn(9)
    branch = program.generate(other, after="resp_1")  # its session has gone on
    assert branch.session != first.session
    assert branch.token_ids == program.generate([*point, *other], key="to compare").token_ids
    djinn.close(onward.session, address=talkative.address)
    restart_under(talkative, program)
    with talkative.client() as client:
        record = client.record("resp_1")
        assert (record.body, record.session, record.length, record.model) == (b"mine", first.session, len(point), MODEL)
        again = client.generate(MODEL, new, after="resp_1", max_tokens=8, ignore_eos=True)
        assert again.token_ids == onward.token_ids
        assert [info.record for info in client.records()] == ["resp_1"]
        client.drop_record("resp_1")
        with pytest.raises(djinn.NotFound, match="resp_1"):
            program.generate(new, after="resp_1")
        assert client.status(check=True).integrity == []


def test_a_session_of_the_caller_s_leaves_a_record(talkative: Daemon) -> None:
    """A call goes on from it when the session is closed."""
    options: GenerateOptions = {"max_tokens": 8, "ignore_eos": True}
    with djinn.Session(MODEL, address=talkative.address) as s:
        first = s.generate("def f(", **options)
        name = s.keep_record()
        onward = s.generate([7], **options)
    reply = djinn.generate(MODEL, [7], after=name, address=talkative.address, **options)
    assert reply.usage.prompt_tokens == first.usage.session_tokens + 1
    assert reply.token_ids == onward.token_ids
    with talkative.client() as client:
        client.drop_record(name)


def test_a_waiting_conversation_is_learnt_by_its_key(talkative: Daemon, program: Program) -> None:
    for _ in range(2):
        reply = program.say(turn(6), key="agent", expected_wait_s=30.0)
        with talkative.client() as client:
            (info,) = [info for info in client.sessions() if info.id == reply.session]
        assert info.state == "waiting"
    reply = program.say(turn(6), key="agent")
    with talkative.client() as client:
        assert [info.state for info in client.sessions() if info.id == reply.session] == ["kept"]


@pytest.mark.parametrize(
    ("conversation", "error"),
    [
        ({"key": "k" * 257}, djinn.InvalidRequest),
        ({"expected_wait_s": float("nan")}, djinn.InvalidRequest),
        ({"expected_wait_s": -1.0}, djinn.InvalidRequest),
        ({"after": "nothing"}, djinn.NotFound),
        ({"model": "nobody"}, djinn.ModelNotFound),
        ({"model": ""}, djinn.InvalidRequest),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_requests_leave_no_session(talkative: Daemon, program: Program, conversation, error) -> None:
    with talkative.client() as client:
        before = {info.id for info in client.sessions()}
        with pytest.raises(error):
            program.generate([1, 2, 3], **conversation)
        with pytest.raises(djinn.PromptTooLong):
            program.generate([1] * 5000)
        with pytest.raises(djinn.InvalidRequest, match="not both"):
            program.ask(build(Generate, session="s", conversation=Conversation(model=MODEL)), Generated)
        assert {info.id for info in client.sessions()} == before
