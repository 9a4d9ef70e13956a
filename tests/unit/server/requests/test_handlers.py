"""All kinds of requests, over real sockets. The scripted engine's token at position p is story[p % len(story)]."""

from __future__ import annotations

import os

import msgspec
import pytest

import djinn_client as djinn
from djinn_client import errors, protocol
from djinn_client.protocol import (
    AttachSession,
    Cancel,
    CloseSession,
    Done,
    Failure,
    ForkSession,
    Forward,
    Generate,
    Generated,
    GetStatus,
    GetTokens,
    HandOverFiles,
    Hello,
    ListModels,
    ListSessions,
    LoadModel,
    OpenSession,
    Piece,
    Ping,
    PlanModel,
    Sampling,
    SetBudget,
    TokenIds,
    Truncate,
    UnloadModel,
)
from djinn_client.protocol.fields.placing import Placing
from tests.support.served import Wire

GONE = "0123456789abcdef"


@pytest.fixture
def session(calm):
    with djinn.Session("djinn-tiny", address=calm.address) as session:
        yield session


@pytest.fixture
def wire(calm):
    with Wire(calm.address) as wire:
        yield wire


@pytest.fixture
def opened(wire):
    """A session that belongs to the wire."""
    reply = wire.ask(OpenSession(id=1, model="djinn-tiny"))
    yield reply.session.id
    wire.ask(CloseSession(id=2, session=reply.session.id))


def story(calm, start, count):
    return [calm.script.story[position % len(calm.script.story)] for position in range(start, start + count)]


def test_generate_continues_from_the_session_s_end(calm, session):
    first = session.generate([5, 6, 7], max_tokens=4)
    assert first.token_ids == story(calm, 3, 4)
    assert (first.finish_reason, first.usage.prompt_tokens, first.usage.session_tokens) == ("length", 3, 7)
    second = session.generate(max_tokens=3)
    assert second.token_ids == story(calm, 7, 3)
    assert second.usage.prompt_tokens == 0
    assert session.token_ids() == [5, 6, 7, *story(calm, 3, 7)]
    assert 0 < first.timings.first_token <= first.timings.total


def test_text_in_text_out(calm, session, tiny):
    reply = session.generate("def", max_tokens=10)
    assert session.token_ids() == [*tiny.encode("def").ids, *reply.token_ids]
    assert reply.text == tiny.decode(reply.token_ids)


def test_a_stream_has_the_text_and_tokens_of_a_collected_call(calm, session):
    length = len(calm.script.story)
    session.generate([5] * length, max_tokens=1)
    session.truncate(length)
    collected = session.generate(max_tokens=length)
    session.truncate(length)
    stream = session.stream(max_tokens=length)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == collected.text
    assert [token for piece in pieces for token in piece.token_ids] == collected.token_ids
    assert len(pieces) > 5 and "Größe" in collected.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_leaves_server_and_engine_with_the_same_session(calm, session, stream):
    """The engine is ahead when it receives the Halt. If its session stayed longer, the next token would differ."""
    session.generate([5], max_tokens=1)
    if stream:
        running = session.stream(max_tokens=200, stop=["return"])
        list(running)
        reply = running.result
    else:
        reply = session.generate(max_tokens=200, stop=["return"])
    assert reply.finish_reason == "stop" and "return" not in reply.text
    tokens = session.token_ids()
    assert tokens[2:] == reply.token_ids
    assert session.generate(max_tokens=2).token_ids == story(calm, len(tokens), 2)


def test_requested_stop_tokens_and_the_model_s_own(calm, session):
    token = calm.script.story[10]
    at = calm.script.story.index(token, 3)
    reply = session.generate([5, 6, 7], max_tokens=200, stop_token_ids=[token])
    assert reply.finish_reason == "stop"
    assert reply.token_ids == story(calm, 3, at - 2)


def test_the_context_ends_an_output(calm, session):
    with pytest.raises(errors.InvalidRequest, match="max_tokens is 7, and there is room for 6") as refused:
        session.generate([5] * 250, max_tokens=7)
    figures = {"field": "max_tokens", "session_tokens": 0, "prompt_tokens": 250, "room": 6}
    assert refused.value.data == figures and session.token_ids() == []
    for fields in ({"max_tokens": 6}, {"max_tokens": None}, {}):
        session.truncate(0)
        reply = session.generate([5] * 250, **fields)
        assert (reply.finish_reason, len(reply.token_ids)) == ("length", 6)
    with pytest.raises(errors.PromptTooLong) as caught:
        session.generate([5], max_tokens=1)
    assert caught.value.data == {"session_tokens": 256, "prompt_tokens": 1, "max_context": 256}


def test_prompt_logprobs(session):
    first = session.generate([5, 6, 7, 8], max_tokens=2, prompt_logprobs=2).prompt_logprobs
    assert [entry and (entry.token, entry.top) for entry in first] == [
        None,
        *((-float(token), {0: 0.0, 1: 0.0}) for token in (6, 7, 8)),
    ]
    stream = session.stream([9], max_tokens=2, prompt_logprobs=0)
    list(stream)
    assert [entry.token for entry in stream.result.prompt_logprobs] == [-9.0]
    assert session.generate([4, 3], max_tokens=0, prompt_logprobs=1).prompt_logprobs[-1].token == -3.0
    assert session.generate(max_tokens=1).prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": 1, "capture": ["logits"]}, "cannot capture"),
    ],
)
def test_prompt_logprobs_that_cannot_be(wire, opened, fields, words):
    reply = wire.ask(Generate(id=7, session=opened, token_ids=[5], **fields))
    assert isinstance(reply, Failure) and words in reply.message


def test_logprobs(session):
    reply = session.generate([5], max_tokens=3, logprobs=2)
    assert [entry.token for entry in reply.logprobs] == [-0.5] * 3
    assert set(reply.logprobs[0].top) == {0, 1}


def test_forward_extends_the_session_and_its_logits_are_shared_memory(session):
    session.generate([5], max_tokens=1)
    logits = session.forward([7, 8, 9])
    assert logits.shape == (3, 2048)
    assert logits[:, 0].tolist() == [7.0, 8.0, 9.0]
    assert session.token_ids()[2:] == [7, 8, 9]


def test_truncate(calm, session):
    session.generate([5, 6, 7], max_tokens=4)
    session.truncate(2)
    assert session.token_ids() == [5, 6]
    assert session.generate(max_tokens=2).token_ids == story(calm, 2, 2)
    session.truncate(0)
    with pytest.raises(errors.InvalidRequest, match="first call needs a prompt"):
        session.generate()
    with pytest.raises(errors.InvalidRequest, match="cannot be cut to 1"):
        session.truncate(1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token_ids": [2048]}, "token_out_of_range"),
        ({"token_ids": [5] * 256}, "prompt_too_long"),
        ({"token_ids": []}, "invalid_request"),
        ({}, "invalid_request"),
        ({"token_ids": [5], "text": "x"}, "invalid_request"),
        ({"token_ids": [5], "max_tokens": -1}, "invalid_request"),
        ({"max_tokens": 0}, "invalid_request"),
        ({"token_ids": [5], "sampling": Sampling(min_tokens=257)}, "invalid_request"),
        ({"token_ids": [5], "sampling": Sampling(logit_bias={2048: 1.0})}, "token_out_of_range"),
        ({"token_ids": [5], "sampling": Sampling(temperature=float("nan"))}, "invalid_request"),
        ({"token_ids": [5], "logprobs": 99}, "invalid_request"),
        ({"token_ids": [5], "stop": [""]}, "invalid_request"),
        ({"token_ids": [5], "stop_token_ids": [9999]}, "token_out_of_range"),
        ({"text": "x" * 100_000}, "prompt_too_long"),
    ],
)
def test_a_refused_generate_leaves_the_session_unchanged(calm, wire, opened, fields, code):
    reply = wire.ask(Generate(id=7, session=opened, **fields))
    assert isinstance(reply, Failure) and (reply.id, reply.code) == (7, code)
    assert wire.ask(GetTokens(id=8, session=opened)).token_ids == []
    assert wire.ask(Generate(id=9, session=opened, token_ids=[5], max_tokens=1)).token_ids == story(calm, 1, 1)


@pytest.mark.parametrize("tokens", [[], [2048], [5] * 257])
def test_invalid_forwards_are_refused(wire, opened, tokens):
    assert isinstance(wire.ask(Forward(id=7, session=opened, token_ids=tokens)), Failure)
    assert wire.ask(GetTokens(id=8, session=opened)).token_ids == []


@pytest.mark.parametrize(
    "request_",
    [
        AttachSession(id=5, session=GONE),
        CloseSession(id=5, session=GONE),
        Generate(id=5, session=GONE, token_ids=[5]),
        Forward(id=5, session=GONE, token_ids=[5]),
        Truncate(id=5, session=GONE, length=0),
        GetTokens(id=5, session="\x00'; --" * 100),
    ],
    ids=lambda request: type(request).__name__,
)
def test_unknown_sessions(wire, request_):
    reply = wire.ask(request_)
    assert isinstance(reply, Failure) and (reply.id, reply.code) == (5, "session_not_found")


def test_a_closed_session_is_unknown(wire):
    session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
    assert wire.ask(CloseSession(id=2, session=session)) == Done(id=2)
    assert wire.ask(CloseSession(id=3, session=session)).code == "session_not_found"


def test_attaching_from_another_connection(calm, session):
    session.generate([5], max_tokens=3)
    again = djinn.Session.attach(session.id, address=calm.address)
    assert again.token_ids() == session.token_ids()
    assert again.generate(max_tokens=1).token_ids == story(calm, 4, 1)
    again.detach()
    assert len(session.token_ids()) == 5


def test_forks_are_independent(calm, wire, opened):
    wire.ask(Generate(id=3, session=opened, token_ids=[5], max_tokens=3))
    reply = wire.ask(ForkSession(id=4, session=opened, priority="batch"))
    fork = reply.session
    assert (fork.model, fork.priority, fork.tokens, fork.state) == ("djinn-tiny", "batch", 4, "idle")
    assert wire.ask(Generate(id=5, session=fork.id, max_tokens=2)).token_ids == story(calm, 4, 2)
    assert len(wire.ask(GetTokens(id=6, session=opened)).token_ids) == 4
    grandchild = wire.ask(ForkSession(id=7, session=fork.id)).session
    assert (grandchild.priority, grandchild.tokens) == ("batch", 6)
    assert wire.ask(CloseSession(id=8, session=fork.id)) == Done(id=8)
    assert wire.ask(Generate(id=9, session=grandchild.id, max_tokens=1)).token_ids == story(calm, 6, 1)
    assert wire.ask(GetStatus(id=10, check=True)).integrity == []
    assert wire.ask(CloseSession(id=11, session=grandchild.id)) == Done(id=11)


def test_a_session_has_one_call_at_a_time(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=2))
        for request in (
            Generate(id=3, session=session),
            Forward(id=3, session=session, token_ids=[1]),
            Truncate(id=3, session=session, length=0),
            ForkSession(id=3, session=session),
        ):
            assert wire.ask(request).code == "session_busy"
        daemon.step(2)
        assert wire.reply().token_ids == [2, 3]
        assert wire.ask(Truncate(id=3, session=session, length=0)) == Done(id=3)


def test_many_requests_of_one_connection_get_one_final_reply_each(calm, wire, opened):
    wire.send(*(Ping(id=number) for number in range(100, 130)))
    wire.send(*(GetTokens(id=number, session=opened) for number in range(130, 160)))
    replies = [wire.reply() for _ in range(60)]
    assert sorted(reply.id for reply in replies) == list(range(100, 160))
    assert {type(reply) for reply in replies} == {Done, TokenIds}


def test_cancelling_ends_a_generation_within_a_step_and_keeps_the_session(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100, stream=True))
        daemon.step(2)
        pieces = [wire.reply(), wire.reply()]
        assert all(isinstance(piece, Piece) for piece in pieces)
        wire.send(Cancel(target=2), Cancel(target=2), Cancel(target=99))
        last = wire.reply()
        assert isinstance(last, Generated) and last.finish_reason == "cancelled"
        tokens = [token for reply in [*pieces, last] for token in reply.token_ids]
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == [5, *tokens] == [5, 2, 3]
        wire.send(Generate(id=2, session=session, max_tokens=1))
        daemon.step()
        assert wire.reply().token_ids == [1]


def test_cancelling_a_forward_leaves_the_session_as_it_was(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Forward(id=2, session=session, token_ids=[5, 6]), Cancel(target=2))
        reply = wire.reply()
        assert (reply.id, reply.code) == (2, "cancelled")
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == []
        wire.send(Generate(id=4, session=session, token_ids=[9], max_tokens=1))
        daemon.step()
        assert wire.reply().token_ids == [2]


def test_closing_a_session_ends_its_call(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100))
        wire.send(CloseSession(id=3, session=session))
        replies = {reply.id: reply for reply in (wire.reply(), wire.reply())}
        assert replies[3] == Done(id=3)
        assert replies[2].finish_reason == "cancelled"
        assert client.status(check=True).integrity == []


# --- descriptions ------------------------------------------------------------------------------------------


def test_listed_sessions_include_the_engine_s_figures(calm, wire, opened):
    wire.ask(Generate(id=3, session=opened, token_ids=[5], max_tokens=4))
    (info,) = (entry for entry in wire.ask(ListSessions(id=4)).sessions if entry.id == opened)
    assert (info.model, info.priority, info.user, info.state) == ("djinn-tiny", "interactive", os.getuid(), "idle")
    assert (info.tokens, info.kv_tokens, info.attached) == (5, 5, 1)
    assert 0 <= info.idle_s <= info.age_s


def test_status(calm, wire, opened):
    status = wire.ask(GetStatus(id=3, check=True))
    assert (status.address, status.pid, status.state) == (calm.address, calm.process.pid, "ready")
    (device,) = status.devices
    assert (device.name, device.state, device.restarts) == ("cpu", "ready", 0)
    assert status.sessions == {"interactive": 1, "agent": 0, "batch": 0}
    assert (status.requests_running, status.requests_queued) == (0, 0)
    assert status.connections >= 1
    assert status.arena_bytes == 4096 + (1 << 16)
    assert status.integrity == []
    (model,) = status.models
    assert (model.name, model.state, model.sessions, model.vocab) == ("djinn-tiny", "ready", 1, 2048)


def test_loaded_and_unloaded_models_are_listed(wire):
    (model,) = wire.ask(ListModels(id=3)).models
    assert (model.name, model.family, model.state) == ("djinn-tiny", "llama", "ready")


def test_loading_a_loaded_model_is_answered_at_once(wire):
    assert wire.ask(LoadModel(id=3, model="djinn-tiny")).model.state == "ready"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (OpenSession(id=3, model="djin-tiny"), "model_not_found"),
        (OpenSession(id=3, model="/not/there"), "files_wanted"),
        (LoadModel(id=3, model="what"), "model_not_found"),
        (LoadModel(id=3, model="djinn-tiny", kv_bytes=-1), "invalid_request"),
        (LoadModel(id=3, model="djinn-tiny", kv_bytes=1 << 30), "invalid_request"),  # it is loaded already
        (
            LoadModel(id=3, model="djinn-tiny", placing=Placing(slots=4)),
            "invalid_request",
        ),  # it is placed otherwise
        (LoadModel(id=3, model="/not/there", placing=Placing(resident=float("nan"))), "invalid_request"),
        (LoadModel(id=3, model="/not/there", placing=Placing(resident=1.5)), "invalid_request"),
        (PlanModel(id=3, model="what"), "model_not_found"),
        (PlanModel(id=3, model="/not/there"), "files_wanted"),
        (PlanModel(id=3, model="djinn-tiny", memory_bytes=-1), "invalid_request"),
        (PlanModel(id=3, model="djinn-tiny", kv_bytes=-1), "invalid_request"),
        (PlanModel(id=3, model="djinn-tiny", placing=Placing(resident=-1)), "invalid_request"),
        (PlanModel(id=3, model="djinn-tiny", memory_bytes=1), "out_of_memory"),
        (SetBudget(id=3, memory_bytes=0), "invalid_request"),
        (SetBudget(id=3, memory_bytes=-1), "invalid_request"),
        (SetBudget(id=3, memory_bytes=1), "out_of_memory"),
        (UnloadModel(id=3, model="what"), "model_not_found"),
        (UnloadModel(id=3, model="/not/there"), "files_wanted"),
        (HandOverFiles(id=3, folder="/not/there", names=["config.json"]), "invalid_request"),
        (HandOverFiles(id=3, folder="there", names=[]), "invalid_request"),
        (HandOverFiles(id=3, folder="/" + "x" * 2000, names=[]), "invalid_request"),
        (HandOverFiles(id=3, folder="/there", names=[]), "model_not_found"),
        (Hello(id=3), "protocol_error"),
    ],
)
def test_an_invalid_request_leaves_the_connection_usable(wire, request_, code):
    reply = wire.ask(request_)
    assert isinstance(reply, Failure) and reply.code == code
    assert wire.ask(Ping(id=4)) == Done(id=4)


def test_loading_a_model_that_is_loaded_as_requested_is_answered_at_once(wire):
    assert wire.ask(LoadModel(id=3, model="djinn-tiny", placing=Placing())).model.blocks_plain == 8


def test_a_plan_changes_nothing(calm, wire):
    (before,) = wire.ask(ListModels(id=3)).models
    plan = wire.ask(PlanModel(id=4, model="djinn-tiny", kv_bytes=7, placing=Placing(resident=5, packing=False))).plan
    assert (plan.model, plan.family, plan.kv_bytes) == ("djinn-tiny", "llama", 7)
    assert (plan.blocks, plan.blocks_plain, plan.blocks_streamed) == (8, 5, 3)
    assert (plan.step_s, plan.notes) == ({1: 0.01, 16: 0.02}, [])
    assert wire.ask(PlanModel(id=5, model="djinn-tiny", memory_bytes=5 << 13)).plan.blocks_plain == 2
    (after,) = wire.ask(ListModels(id=6)).models
    assert after.idle_s > before.idle_s and msgspec.structs.replace(after, idle_s=before.idle_s) == before


def test_an_unknown_model_is_forgotten_when_it_fails(wire):
    wire.ask(OpenSession(id=3, model="/not/there"))
    assert [model.name for model in wire.ask(ListModels(id=4)).models] == ["djinn-tiny"]


def test_the_handshake_names_the_caller(calm):
    with Wire(calm.address, hello=False) as wire:
        welcome = wire.ask(Hello(id=0, client="a test"))
        assert isinstance(welcome, protocol.Welcome)
        assert (welcome.user, welcome.admin, welcome.version) == (os.getuid(), True, djinn.__version__)
