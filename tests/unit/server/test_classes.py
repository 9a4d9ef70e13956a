"""Changes of class, hints and explanations, over real sockets: messages to the engine, and the server's replies."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import djinn_client as djinn
from djinn_client.protocol import (
    Done,
    ExplainSession,
    Generate,
    Generated,
    GetStatus,
    OpenSession,
    PauseSession,
    Ping,
    SetPriority,
    Signal,
    WhyReply,
)
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all
from tests.support.scripted_engine.script import Script
from tests.support.served import Wire, wait_for


def why(wire, session):
    reply = wire.ask(ExplainSession(id=90, session=session))
    assert isinstance(reply, WhyReply), reply
    return reply.why


def class_of(daemon, session):
    with daemon.client() as client:
        return {info.id: info.priority for info in client.sessions()}[session]


# --- class ------------------------------------------------------------------------------------------------------------


def test_a_class_is_changed_while_a_call_runs(daemon, wire, opened):
    wire.send(Generate(id=2, session=opened, token_ids=[5], max_tokens=2))
    assert djinn.set_priority(opened, "batch", address=daemon.address) is None
    assert class_of(daemon, opened) == "batch"
    assert why(wire, opened).figures["priority"] == "batch", "the engine was told"
    daemon.step(2)
    assert wire.reply().token_ids == [2, 3]


def test_a_class_survives_the_engine_and_the_daemon(daemon, wire, opened):
    wire.ask(SetPriority(id=2, session=opened, priority="agent"))
    assert wire.ask(SetPriority(id=3, session=opened, priority="batch")) == Done(id=3)
    daemon.signal(signal.SIGKILL)
    daemon.process.wait()
    daemon.start()
    wait_for(lambda: daemon.log.count("djinnd_ready") == 2)
    assert class_of(daemon, opened) == "batch"


def test_an_unknown_session_has_no_class(wire):
    for request in (SetPriority(id=2, session="0123456789abcdef", priority="batch"), ExplainSession(id=2, session="x")):
        assert wire.ask(request).code == "session_not_found"


def test_a_class_above_the_user_s_highest_is_refused(serve):
    daemon = serve(quotas={"everybody": {"highest_class": "agent"}})
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny", priority="batch")).session.id
        assert wire.ask(SetPriority(id=2, session=session, priority="interactive")).code == "quota_exceeded"
        assert class_of(daemon, session) == "batch"
        assert wire.ask(SetPriority(id=3, session=session, priority="agent")) == Done(id=3)


# --- hints ------------------------------------------------------------------------------------------------------------


def test_hints_of_a_call_reach_the_engine(wire, opened):
    began = time.monotonic()
    targets = {"between_tokens_s": 0.25, "first_token_s": 0.0}
    hints = {"expected_tokens": 7, "deadline_s": 1000.0, **targets}
    wire.send(Generate(id=2, session=opened, token_ids=[5], max_tokens=9, **hints))
    wire.ask(Ping(id=3))
    figures = why(wire, opened).figures
    assert figures["expected_tokens"] == 7
    assert (figures["between_tokens"], figures["first_token"]) == (0.25, 0.0)
    assert 1000.0 - (time.monotonic() - began) <= figures["deadline_in_s"] <= 1000.0


def test_a_call_without_hints_sends_none(wire, opened):
    wire.send(Generate(id=2, session=opened, token_ids=[5], max_tokens=9))
    wire.ask(Ping(id=3))
    figures = why(wire, opened).figures
    assert (figures["expected_tokens"], figures["deadline_in_s"]) == (0, 0.0)
    assert (figures["between_tokens"], figures["first_token"]) == ("class", "class")


def test_wrong_hints_are_refused(wire, opened):
    for fields in (
        {"expected_tokens": -1},
        {"deadline_s": -1.0},
        {"deadline_s": float("inf")},
        {"between_tokens_s": -1.0},
    ):
        assert wire.ask(Generate(id=2, session=opened, token_ids=[5], **fields)).code == "invalid_request"


def test_signals_reach_the_engine_with_their_details(wire, opened):
    wire.send(Signal(session=opened, kind="IO_WAIT", expected_s=2.5, tool="search"))
    told = why(wire, opened)
    assert (told.state, told.figures["wait_of"]) == ("waiting", "search 2.5")
    wire.send(Signal(session=opened, kind="COMPUTE"))
    assert why(wire, opened).state == "idle"


# --- why --------------------------------------------------------------------------------------------------------------


def test_own_sessions_ahead_are_named(wire, opened):
    second = wire.ask(OpenSession(id=2, model="djinn-tiny")).session.id
    told = why(wire, second)
    assert (told.state, told.reason) == ("idle", "the script says so")
    assert (told.ahead, told.others_ahead) == ([opened], 0)


@only_root
def test_other_users_sessions_ahead_are_counted_and_named_to_administrators_only(daemon, wire, opened):
    open_to_all(daemon.folder, daemon.address)
    with as_user(NOBODY):
        stranger = Wire(daemon.address)
    with stranger:
        first, second = (stranger.ask(OpenSession(id=n, model="djinn-tiny")).session.id for n in (1, 2))
        told = why(stranger, second)
        assert (told.ahead, told.others_ahead) == ([first], 1), told
        assert stranger.ask(ExplainSession(id=3, session=opened)).code == "session_not_found"
        assert why(wire, second).ahead == [opened, first], "root is an administrator"


def test_a_session_without_clients(daemon, wire, opened):
    wire.socket.close()
    wait_for(lambda: why_of(daemon, opened).state == "detached")
    told = why_of(daemon, opened)
    assert "no client is attached" in told.reason and 0 < told.figures["closed_in_s"] <= 600


def why_of(daemon, session):
    return djinn.why(session, address=daemon.address)


def test_a_session_with_a_model_that_is_not_ready(serve):
    """The engine dies, and the next ones do not become ready."""
    daemon = serve(Script(on_start={"1": "die", "2": "die"}))
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        os.kill(wire.ask(GetStatus(id=2)).devices[0].pid, signal.SIGKILL)
        wait_for(lambda: "there is no engine for its model" in why(wire, session).reason)
        assert why(wire, session).reason.startswith("no call runs on it, and ")
        wire.send(Generate(id=3, session=session, token_ids=[5], max_tokens=1))
        told = why(wire, session)
        assert (told.state, told.reason.partition(":")[0]) == ("queued", "its call waits")
        while not isinstance(reply := wire.reply(), Generated):
            assert reply.id == 3, reply


def test_a_session_that_is_paused_without_an_engine(serve):
    daemon = serve(Script(on_start={"1": "die", "2": "die"}))
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.ask(PauseSession(id=2, session=session))
        os.kill(wire.ask(GetStatus(id=3)).devices[0].pid, signal.SIGKILL)
        wait_for(lambda: "it is paused until it is resumed, and" in why(wire, session).reason)
        assert why(wire, session).state == "paused"


def test_a_session_restored_after_a_restart(daemon, wire, opened):
    wire.socket.close()
    daemon.stop()
    daemon.start()
    wait_for(lambda: daemon.log.count("djinnd_ready") == 2)
    with djinn.Session.attach(opened, address=daemon.address) as s:
        told = s.why()
        assert (told.state, told.reason) == (
            "idle",
            "no call runs on it, and its model is not loaded: the next call loads it",
        )


def test_both_clients_and_the_module_give_the_same_answer(daemon, wire, opened):
    async def main():
        session = await djinn.AsyncSession.attach(opened, address=daemon.address)
        try:
            return await session.why()
        finally:
            await session.detach()

    with djinn.Client(daemon.address) as client:
        told = client.why(opened)
    assert told == djinn.why(opened, address=daemon.address) == asyncio.run(main())
