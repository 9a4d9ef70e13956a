"""Signals, pause and resume, over real sockets: the messages to the scripted engine, and the states that `ps` shows."""

from __future__ import annotations

import os
import signal

import msgspec

import djinn_client as djinn
from djinn_client.protocol import (
    Cancel,
    Done,
    Failure,
    ForkSession,
    Generate,
    GetStatus,
    GetTokens,
    OpenSession,
    PauseReply,
    PauseSession,
    Piece,
    Ping,
    ResumeSession,
    Signal,
    Truncate,
)
from tests.support.scripted_engine.script import PAGE_BYTES
from tests.support.served import Wire, encode_payload, wait_for


def info_of(daemon, session):
    with daemon.client() as client:
        return {info.id: info for info in client.sessions()}[session]


def states(daemon):
    with daemon.client() as client:
        status = client.status(check=True)
    assert status.integrity == []
    return status.requests_running, status.requests_queued


def test_signals_reach_the_engine_and_are_shown(daemon, wire, opened):
    wire.send(Generate(id=2, session=opened, token_ids=[5] * 20, max_tokens=1))
    daemon.step()
    wire.reply()
    before = info_of(daemon, opened)
    assert (before.state, before.pages, before.host_pages, before.page_bytes) == ("idle", 2, 0, PAGE_BYTES)
    wire.send(Signal(session=opened, kind="IO_WAIT", expected_s=8))
    assert wire.ask(Ping(id=3)) == Done(id=3), "a signal has no reply"
    waiting = info_of(daemon, opened)
    assert (waiting.state, waiting.pages, waiting.host_pages, waiting.kv_tokens) == ("waiting", 0, 2, 0)
    wire.send(Signal(session=opened, kind="COMPUTE"))
    wire.ask(Ping(id=4))
    assert info_of(daemon, opened).state == "idle"


def test_meaningless_signals_are_ignored(daemon, wire, opened):
    for ignored, fields in enumerate(MEANINGLESS):
        wire.send(Signal(**{"session": opened} | fields))
        assert wire.ask(Ping(id=2)) == Done(id=2)
        assert info_of(daemon, opened).state == "idle"
        assert daemon.log.count("signal_ignored") == ignored + 1


MEANINGLESS = [
    {"kind": "IO_WAIT", "expected_s": -1.0},
    {"kind": "IO_WAIT", "expected_s": float("nan")},
    {"kind": "IO_WAIT", "expected_s": 1e300},
    {"kind": "io_wait"},
    {"kind": "SLEEP", "expected_s": 3.0},
    {"kind": "COMPUTE", "expected_s": 3.0},
    {"session": "0123456789abcdef", "kind": "IO_WAIT"},
    {"session": "\x00'; --" * 500, "kind": "IO_WAIT"},
]


def test_a_signal_that_cannot_be_decoded_ends_the_connection(daemon, wire):
    """A signal has no id that a reply could name."""
    reply = wire.ask(Signal(session="s" * 4097, kind="IO_WAIT"))
    assert isinstance(reply, Failure) and reply.code == "protocol_error"
    assert wire.reply() is None


def test_a_signal_before_hello_ends_the_connection(daemon):
    with Wire(daemon.address, hello=False) as wire:
        reply = wire.ask(Signal(session="s", kind="COMPUTE"))
        assert isinstance(reply, Failure) and reply.code == "protocol_error"
        assert wire.reply() is None


def test_a_signal_with_other_types_is_no_message(wire):
    payload = msgspec.msgpack.encode({"type": "signal", "session": 7, "kind": "COMPUTE"})
    wire.send_bytes(encode_payload(payload))
    assert wire.reply().code == "protocol_error"


def test_pausing_during_a_stream_from_another_connection(daemon, wire, opened):
    wire.send(Generate(id=2, session=opened, token_ids=[5], max_tokens=4, stream=True))
    daemon.step(2)
    pieces = [wire.reply(), wire.reply()]
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert states(daemon) == (1, 0)
    reply = djinn.pause(opened, address=daemon.address)
    assert reply == PauseReply(id=reply.id, tier="host", pages=1, nbytes=PAGE_BYTES, seconds=0.125)
    info = info_of(daemon, opened)
    assert (info.state, info.pages, info.host_pages) == ("paused", 0, 1)
    assert states(daemon) == (0, 1)
    assert wire.ask(Ping(id=3)) == Done(id=3), "a piece came after the pause"
    djinn.unpause(opened, address=daemon.address)
    assert info_of(daemon, opened).state == "running"
    daemon.step(2)
    pieces += [wire.reply(), wire.reply()]
    last = wire.reply()
    assert [token for piece in [*pieces, last] for token in piece.token_ids] == [2, 3, 1, 2]
    assert last.finish_reason == "length"


def test_a_call_on_a_paused_session_waits(daemon, wire, opened):
    assert wire.ask(PauseSession(id=2, session=opened)).pages == 0
    assert info_of(daemon, opened).state == "paused"
    wire.send(Generate(id=3, session=opened, token_ids=[5], max_tokens=1))
    assert wire.ask(Ping(id=4)) == Done(id=4)
    assert (info_of(daemon, opened).state, states(daemon)) == ("paused", (0, 1))
    assert wire.ask(ResumeSession(id=5, session=opened)) == Done(id=5)
    daemon.step()
    assert wire.reply().token_ids == [2]


def test_a_call_on_a_paused_session_can_be_cancelled(daemon, wire, opened):
    wire.ask(PauseSession(id=2, session=opened))
    wire.send(Generate(id=3, session=opened, token_ids=[5], max_tokens=1))
    assert wire.ask(Ping(id=4)) == Done(id=4)
    wire.send(Cancel(target=3))
    assert wire.reply().finish_reason == "cancelled"
    assert info_of(daemon, opened).state == "paused"


def test_pausing_and_resuming_again_change_nothing(daemon, wire, opened):
    for number in (2, 3):
        assert isinstance(wire.ask(PauseSession(id=number, session=opened)), PauseReply)
    for number in (4, 5):
        assert wire.ask(ResumeSession(id=number, session=opened)) == Done(id=number)
    assert info_of(daemon, opened).state == "idle"


def test_a_failed_pause_leaves_the_session_as_it_was(daemon, wire, opened):
    reply = wire.ask(PauseSession(id=2, session=opened, tier="disk"))
    assert (reply.code, reply.message) == ("out_of_memory", "the disk is full")
    assert info_of(daemon, opened).state == "idle"
    wire.ask(PauseSession(id=3, session=opened))
    assert wire.ask(PauseSession(id=4, session=opened, tier="disk")).code == "out_of_memory"
    assert info_of(daemon, opened).state == "paused"


def test_invalid_pauses_are_refused(wire, opened):
    for request in (PauseSession(id=2, session="0123456789abcdef"), ResumeSession(id=2, session="0123456789abcdef")):
        assert wire.ask(request).code == "session_not_found"
    assert wire.ask(PauseSession(id=2, session=opened, tier="device")).code == "invalid_request"


def test_a_paused_session_can_be_forked_cut_and_read(daemon, wire, opened):
    wire.send(Generate(id=2, session=opened, token_ids=[5, 6], max_tokens=1))
    daemon.step()
    wire.reply()
    wire.ask(PauseSession(id=3, session=opened))
    fork = wire.ask(ForkSession(id=4, session=opened)).session
    assert (fork.tokens, fork.state) == (3, "idle")
    assert wire.ask(Truncate(id=5, session=opened, length=1)) == Done(id=5)
    assert wire.ask(GetTokens(id=6, session=opened)).token_ids == [5]
    assert info_of(daemon, opened).state == "paused"


def test_a_session_stays_paused_when_the_engine_dies(daemon, wire, opened):
    """Its call waits in the next engine."""
    other = wire.ask(OpenSession(id=2, model="djinn-tiny")).session.id
    wire.send(Generate(id=3, session=opened, token_ids=[5], max_tokens=2))
    wire.ask(PauseSession(id=4, session=opened))
    pid = wire.ask(GetStatus(id=5)).devices[0].pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: daemon.starts == 2 and wire.ask(GetStatus(id=6)).models[0].state == "ready")
    assert (info_of(daemon, opened).state, info_of(daemon, other).state) == ("paused", "idle")
    assert states(daemon) == (0, 1)
    wire.ask(ResumeSession(id=9, session=opened))
    daemon.step(2)
    assert wire.reply().token_ids == [2, 3]


def test_a_daemon_that_stops_does_not_wait_for_paused_sessions(serve):
    daemon = serve(gated=True, limits={"shutdown_grace": "1h"})
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=9))
        wire.ask(PauseSession(id=3, session=session))
        daemon.signal(signal.SIGTERM)
        assert wire.reply().finish_reason == "cancelled"
        assert daemon.stop() == 0


def test_a_pause_without_an_engine_applies_to_the_next_one(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        client.pause_session(session)
        wait_for(lambda: client.status().models[0].state == "ready" and client.status().devices[0].restarts)
        (info,) = client.sessions()
        assert info.state == "paused"
