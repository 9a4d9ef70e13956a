"""The engine dies, hangs, or sends garbage during work. Calls continue on the next engine, a request that kills engines
ends, the next call works, and nothing is left. The engine is scripted: at position p each engine says story[p % 3]."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from djinn_client import EngineLost, OutOfMemory
from djinn_client.protocol import (
    Cancel,
    Done,
    Forward,
    Generate,
    Generated,
    GetTokens,
    OpenSession,
    Ping,
    Progress,
    Truncate,
)
from tests.support.parameters import long_except
from tests.support.scripted_engine.script import Script
from tests.support.served import Wire, wait_for

pytestmark = pytest.mark.smoke

TROUBLE = 77  # first token of a fatal prompt


def fatal(what, **fields):
    return Script(on_token={str(TROUBLE): what}, **fields)


@pytest.mark.parametrize("what", long_except(("die",), ("die", "garbage", "hang")))
def test_a_request_that_two_engines_die_over_ends_and_all_others_continue(serve, what):
    daemon = serve(fatal(what), limits={"engine_silence": "2s"} if what == "hang" else {})
    with daemon.client() as client:
        sessions = [djinn.Session("djinn-tiny", address=daemon.address) for _ in range(4)]
        for session in sessions:
            assert session.generate([5], max_tokens=3).token_ids == [2, 3, 1]
        with pytest.raises(EngineLost, match="2 engines have died with this request") as caught:
            sessions[0].generate([TROUBLE], max_tokens=200)
        assert caught.value.data == {"deaths": 2}
        for session in sessions:
            assert session.token_ids() == [5, 2, 3, 1], "the failed call sent no token, and leaves none"
            assert session.generate(max_tokens=2).token_ids == [2, 3]
        status = client.status(check=True)
        assert status.integrity == []
        assert (status.devices[0].restarts, status.requests_running) == (2, 0)
        assert len(daemon.arena()) == 1
        for session in sessions:
            session.close()
        assert client.status(check=True).integrity == []


def test_a_killed_engine_costs_callers_only_time(serve):
    """One call is in mid-stream, another waits. The death itself is noticed, and not a silence."""
    daemon = serve(Script(context=1 << 20), gated=True, limits={"engine_silence": "1h"})
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as other:
        client.load("djinn-tiny")
        streaming = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        waiting = other.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=streaming, token_ids=[5], max_tokens=7, stream=True))
        daemon.step(2)
        pieces = [wire.reply() for _ in range(2)]
        other.send(Generate(id=2, session=waiting, token_ids=[5, 6], max_tokens=3))
        wait_for(lambda: {s.id: s.state for s in client.sessions()}[waiting] == "queued")
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().requests_queued == 2 and daemon.starts == 2)
        daemon.step(12)
        told, last = [token for piece in pieces for token in piece.token_ids], None
        while not isinstance(last := wire.reply(), Generated):
            told += last.token_ids
        assert [*told, *last.token_ids] == [2, 3, 1, 2, 3, 1, 2]
        assert (last.usage.prompt_tokens, last.usage.generated_tokens, last.usage.computed_tokens) == (1, 7, 1)
        assert other.reply().token_ids == [3, 1, 2]
        assert client.status(check=True).integrity == []


def test_requests_in_the_step_at_two_deaths_keep_the_tokens_that_were_sent(serve):
    daemon = serve(Script(context=1 << 20), gated=True, limits={"engine_silence": "1h"})
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5, 6], max_tokens=100, stream=True))
        told = []
        for death in range(2):
            wait_for(lambda: client.status().requests_queued + client.status().requests_running == 1)
            daemon.step(2)
            told += [wire.reply().token_ids[0] for _ in range(2)]
            os.kill(client.status().devices[0].pid, signal.SIGKILL)
            wait_for(lambda death=death: daemon.starts == death + 2)
        failure = wire.reply()
        assert (failure.code, failure.data) == ("engine_lost", {"deaths": 2})
        assert told == [3, 1, 2, 3]
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == [5, 6, *told]
        wire.send(Generate(id=4, session=session, max_tokens=2))
        wait_for(lambda: client.status().requests_queued == 1)
        daemon.step(2)
        assert wire.reply().token_ids == [1, 2]


@pytest.mark.long
def test_a_request_that_kills_engines_does_not_end_another_stream(serve):
    """The stream is in the step at both deaths, but has produced tokens."""
    daemon = serve(fatal("die", context=1 << 20))
    with (
        djinn.Session("djinn-tiny", address=daemon.address) as victim,
        djinn.Session("djinn-tiny", address=daemon.address) as guilty,
    ):
        stream = victim.stream([5], max_tokens=60_000)
        told = next(stream).token_ids
        with pytest.raises(EngineLost, match="2 engines have died"):
            guilty.generate([TROUBLE], max_tokens=5)
        told += [token for piece in stream for token in piece.token_ids]
        assert told == [[1, 2, 3][position % 3] for position in range(1, 60_001)]
        assert guilty.generate([5], max_tokens=1).token_ids == [2]


@pytest.mark.parametrize("told", [0, 2])
def test_a_call_that_waits_for_an_engine_is_cancelled_at_once(serve, told):
    daemon = serve(Script(on_start={"2": "hang"}), gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100, stream=True))
        daemon.step(told)
        pieces = [wire.reply() for _ in range(told)]
        wait_for(lambda: client.sessions()[0].state in ("queued", "running"))
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        wire.send(Cancel(target=2))
        reply = wire.reply()
        assert (reply.finish_reason, reply.token_ids, reply.usage.generated_tokens) == ("cancelled", [], told)
        assert len(pieces) == told
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == [5, 2, 3][: 1 + told]
        daemon.kill_starting_engine()
        client.load("djinn-tiny")
        assert client.status(check=True).integrity == []


def test_the_wait_for_an_engine_is_limited_and_keeps_the_tokens_that_were_sent(serve):
    daemon = serve(Script(on_start={"2": "hang"}), gated=True, limits={"engine_wait": "1s"})
    with daemon.client() as client, Wire(daemon.address) as wire:
        wait_for(lambda: client.status().state == "ready")
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100, stream=True))
        daemon.step(2)
        assert [wire.reply().token_ids for _ in range(2)] == [[2], [3]]
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        assert wire.reply().code == "engine_lost"
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == [5, 2, 3]
        daemon.kill_starting_engine()


@pytest.mark.parametrize("stop", [False, True])
def test_an_engine_s_last_message_is_not_needed(serve, tiny, stop):
    """The engine dies between the last token and the end of the request."""
    daemon = serve(Script(story=[33, 34, 35]), gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        text = tiny.decode([34, 35])
        fields = {"max_tokens": 50, "stop": [text]} if stop else {"max_tokens": 3}
        wire.send(Generate(id=2, session=session, token_ids=[5], **fields))
        pid = client.status().devices[0].pid
        daemon.step(3 if stop else 2)
        wait_for(lambda: client.sessions()[0].tokens >= 3)
        if not stop:
            daemon.step(1)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        daemon.step(5)
        reply = wire.reply()
        assert reply.finish_reason == ("stop" if stop else "length")
        assert reply.token_ids == ([34, 35] if stop else [34, 35, 33])


def test_forward_and_capture_are_computed_again(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as other:
        client.load("djinn-tiny")
        logits, captured = (each.ask(OpenSession(id=1, model="djinn-tiny")).session.id for each in (wire, other))
        wire.send(Forward(id=2, session=logits, token_ids=[7, 8, 9]))
        wait_for(lambda: client.status().requests_queued == 1)
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2 and client.status().requests_queued == 1)
        daemon.step()
        assert wire.reply().tokens == 3
        other.send(Generate(id=2, session=captured, token_ids=[5, 6], max_tokens=4, stream=True, capture=["blocks.3"]))
        daemon.step(2)
        told = [other.reply().token_ids[0] for _ in range(2)]
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 3)
        daemon.step(2)
        while not isinstance(last := other.reply(), Generated):
            told += last.token_ids
        assert told == [3, 1, 2, 3]
        assert (last.captured.first, last.captured.positions) == (0, 5), "the same as without the death"
        assert client.status(check=True).integrity == []


def test_calls_without_an_engine_wait_for_the_next_one(serve):
    daemon = serve(Script(on_start={"2": "hang"}))
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        assert wire.ask(Generate(id=2, session=session, token_ids=[5], max_tokens=1)).token_ids == [2]
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        assert client.status().state == "starting"
        assert wire.ask(GetTokens(id=3, session=session)).token_ids == [5, 2]
        assert wire.ask(Truncate(id=4, session=session, length=1)) == Done(id=4)
        assert client.sessions()[0].kv_tokens == 0
        wire.send(Generate(id=5, session=session, max_tokens=2))
        assert wire.ask(Ping(id=6)) == Done(id=6)
        daemon.kill_starting_engine()
        while isinstance(reply := wire.reply(), Progress):
            pass
        assert reply.token_ids == [2, 3]
        assert daemon.starts == 3


def test_the_arena_is_handed_to_the_next_engine(serve):
    daemon = serve()
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        before = daemon.arena()
        told = []
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        client.load("djinn-tiny", on_progress=lambda progress: told.append(progress.stage))
        assert daemon.arena() == before
        session.generate([5], max_tokens=1)
        assert "filled" not in told, "the weights were adopted"


def test_a_session_closed_without_an_engine_does_not_come_back(serve):
    daemon = serve(Script(on_start={"2": "hang"}))
    with daemon.client() as client:
        session = djinn.Session("djinn-tiny", address=daemon.address)
        stays = djinn.Session("djinn-tiny", address=daemon.address)
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        session.close()
        daemon.kill_starting_engine()
        client.load("djinn-tiny")
        assert client.status(check=True).integrity == []
        assert [info.id for info in client.sessions()] == [stays.id]
        stays.close()


def test_a_failed_step_costs_its_own_request_only(serve):
    daemon = serve(fatal("fail"))
    with (
        djinn.Session("djinn-tiny", address=daemon.address) as unlucky,
        djinn.Session("djinn-tiny", address=daemon.address) as lucky,
    ):
        unlucky.generate([5], max_tokens=1)
        with pytest.raises(OutOfMemory, match="ran out of memory") as caught:
            unlucky.generate([TROUBLE], max_tokens=5)
        assert caught.value.data == {"bytes": 7}
        assert unlucky.token_ids() == [5, 2]
        assert unlucky.generate(max_tokens=2).token_ids == [3, 1]
        assert lucky.generate([5], max_tokens=1).token_ids == [2]


def test_forks_continue_from_their_tokens_after_a_loss(serve):
    daemon = serve(fatal("die"))
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as parent:
        parent.generate([5], max_tokens=3)
        with parent.fork() as fork, fork.fork() as other:
            fork.generate([7], max_tokens=1)
            with pytest.raises(EngineLost, match="2 engines have died"):
                parent.generate([TROUBLE], max_tokens=3)
            assert (fork.token_ids(), other.token_ids()) == ([5, 2, 3, 1, 7, 3], [5, 2, 3, 1])
            with other.fork() as late:
                assert [each.generate(max_tokens=1).token_ids for each in (parent, other, late)] == [[2]] * 3
            assert fork.generate(max_tokens=1).token_ids == [1]
            assert client.status(check=True).integrity == []
