"""The engine dies, hangs, or speaks garbage in the middle of work. Of each: every caller has an error, the next call
works, and nothing is left. The engine is scripted: at position p it says story[p % 3], whatever engine it is."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import djinn_client as djinn
from djinn_client import EngineLost, OutOfMemory
from djinn_client.protocol import Done, Generate, GetTokens, OpenSession, Piece, Ping, Progress, Truncate
from tests.support.engine import Script
from tests.support.served import Wire, wait_for

TROUBLE = 77  # the token that begins a fatal prompt


def fatal(what, **fields):
    return Script(on_token={str(TROUBLE): what}, **fields)


@pytest.mark.parametrize("what", ["die", "garbage", "hang"])
def test_every_caller_has_an_error_and_the_next_calls_go_on_where_they_were(serve, what):
    daemon = serve(fatal(what), limits={"engine_silence": "3s"} if what == "hang" else {})
    with daemon.client() as client:
        sessions = [djinn.Session("djinn-tiny", address=daemon.address) for _ in range(4)]
        for session in sessions:
            assert session.generate([5], max_tokens=3).token_ids == [2, 3, 1]
        errors = []

        def call(session, prompt):
            try:
                session.generate(prompt, max_tokens=200)
            except EngineLost as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(s, [TROUBLE])) for s in sessions[:1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 1
        for session in sessions:
            assert session.token_ids == [5, 2, 3, 1], "what a failed call brought is gone, all else is there"
            assert session.generate(max_tokens=2).token_ids == [2, 3]
        status = client.status(check=True)
        assert status.integrity == []
        assert (status.devices[0].restarts, status.requests_running) == (1, 0)
        assert len(daemon.arena()) == 1
        for session in sessions:
            session.close()
        assert client.status(check=True).integrity == []


def test_a_killed_engine_costs_callers_in_mid_stream_an_error_at_once(serve):
    """By its death: nobody has to wait until its silence is noticed."""
    daemon = serve(Script(context=1 << 20), gated=True, limits={"engine_silence": "1h"})
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as other:
        client.load("djinn-tiny")
        streaming = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        waiting = other.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=streaming, token_ids=[5], max_tokens=100, stream=True))
        daemon.step(2)
        assert all(isinstance(wire.reply(), Piece) for _ in range(2))
        other.send(Generate(id=2, session=waiting, token_ids=[5, 6], max_tokens=100))
        wait_for(lambda: {s.id: s.state for s in client.sessions()}[waiting] == "queued")
        pid = client.status().devices[0].pid
        os.kill(pid, signal.SIGKILL)
        assert [wire.reply().code, other.reply().code] == ["engine_lost", "engine_lost"]
        assert wire.ask(GetTokens(id=3, session=streaming)).token_ids == []
        wire.send(Generate(id=4, session=streaming, token_ids=[5, 6], max_tokens=2))
        daemon.step(2)
        assert wire.reply().token_ids == [3, 1]


def test_calls_that_come_while_there_is_no_engine_wait_and_then_work(serve):
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
        daemon.kill_newborn()
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
        assert "filled" not in told, "the weights were there"


def test_a_session_that_is_closed_while_there_is_no_engine_does_not_come_back(serve):
    daemon = serve(Script(on_start={"2": "hang"}))
    with daemon.client() as client:
        session = djinn.Session("djinn-tiny", address=daemon.address)
        stays = djinn.Session("djinn-tiny", address=daemon.address)
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2)
        session.close()
        daemon.kill_newborn()
        client.load("djinn-tiny")
        assert client.status(check=True).integrity == []
        assert [info.id for info in client.sessions()] == [stays.id]
        stays.close()


def test_an_engine_that_dies_while_it_loads_is_told_to_all_and_not_tried_again_by_itself(serve):
    daemon = serve(Script(on_load={"djinn-tiny": "die"}))
    with daemon.client() as client:
        with pytest.raises(EngineLost, match=r"SIGKILL|died"):
            client.load("djinn-tiny")
        wait_for(lambda: client.status().state == "ready")
        assert daemon.arena() == []
        assert client.models()[0].state == "failed"


def test_a_step_that_fails_costs_its_own_request_only(serve):
    daemon = serve(fatal("fail"))
    with (
        djinn.Session("djinn-tiny", address=daemon.address) as unlucky,
        djinn.Session("djinn-tiny", address=daemon.address) as lucky,
    ):
        unlucky.generate([5], max_tokens=1)
        with pytest.raises(OutOfMemory, match="ran out of memory") as caught:
            unlucky.generate([TROUBLE], max_tokens=5)
        assert caught.value.data == {"bytes": 7}
        assert unlucky.token_ids == [5, 2]
        assert unlucky.generate(max_tokens=2).token_ids == [3, 1]
        assert lucky.generate([5], max_tokens=1).token_ids == [2]


def test_forks_of_a_lost_engine_go_on_from_their_tokens(serve):
    daemon = serve(fatal("die"))
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as parent:
        parent.generate([5], max_tokens=3)
        with parent.fork() as fork, fork.fork() as other:
            fork.generate([7], max_tokens=1)
            with pytest.raises(EngineLost):
                parent.generate([TROUBLE], max_tokens=3)
            assert (fork.token_ids, other.token_ids) == ([5, 2, 3, 1, 7, 3], [5, 2, 3, 1])
            with other.fork() as late:
                assert [each.generate(max_tokens=1).token_ids for each in (parent, other, late)] == [[2]] * 3
            assert fork.generate(max_tokens=1).token_ids == [1]
            assert client.status(check=True).integrity == []
