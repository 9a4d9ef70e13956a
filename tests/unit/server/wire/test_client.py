"""A client that breaks the rules gets an error, and other clients notice nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import msgspec
import pytest

from djinn_client.protocol import (
    HEADER,
    AddFunction,
    Cancel,
    CloseSession,
    Done,
    Failure,
    Generate,
    GetStatus,
    GetTokens,
    Hello,
    ListModels,
    OpenSession,
    Piece,
    Ping,
    encode,
)
from tests.support.scripted_engine.script import Script
from tests.support.served import PATIENCE, ROOT, Wire, wait_for


@pytest.fixture
def wire(calm):
    with Wire(calm.address) as wire:
        yield wire
        assert_alive(calm)


def assert_alive(daemon):
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "protocol_error"),
        (b"\x00" * 100, "protocol_error"),
        (HEADER.pack(b"DJ", 9, 0, 5) + b"hello", "version_mismatch"),
        (HEADER.pack(b"DJ", 1, 250, 5) + b"hello", "protocol_error"),
        (HEADER.pack(b"DJ", 1, 0, (16 << 20) + 1), "frame_too_large"),
    ],
)
@pytest.mark.parametrize("hello", [True, False])
def test_bytes_that_are_no_frame_get_a_last_reply_and_close_the_connection(calm, data, code, hello):
    with Wire(calm.address, hello) as wire:
        wire.send_bytes(data)
        reply = wire.reply()
        assert isinstance(reply, Failure) and (reply.id, reply.code) == (0, code)
        assert wire.reply() is None
    assert_alive(calm)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode(
            {"type": "ping", "id": 5, "extra": 1, "text": "\ud800".encode("utf-8", "surrogatepass")}
        ),
        msgspec.msgpack.encode({"type": "generate", "id": 5}),
        msgspec.msgpack.encode({"type": "generate", "id": 5, "session": 7}),
        msgspec.msgpack.encode({"type": "generate", "id": 5, "session": "x", "token_ids": [-1]}),
        msgspec.msgpack.encode({"type": "generate", "id": 5, "session": "x", "token_ids": [1 << 40]}),
        msgspec.msgpack.encode({"type": "open", "id": 5, "model": "m", "priority": "royal"}),
        msgspec.msgpack.encode({"type": "unheard-of", "id": 5}),
    ],
)
def test_a_message_that_is_no_request_fails_for_its_id_and_the_connection_stays(wire, payload):
    wire.send_payload(payload)
    reply = wire.reply()
    assert reply.id == 5
    assert isinstance(reply, Done) or reply.code == "invalid_request"
    assert wire.ask(Ping(id=6)) == Done(id=6)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode({"type": "ping", "id": "five"})])
def test_a_message_without_an_id_ends_the_connection(wire, payload):
    wire.send_payload(payload)
    reply = wire.reply()
    assert isinstance(reply, Failure) and reply.id == 0
    assert wire.reply() is None


def test_hello_comes_first(calm):
    with Wire(calm.address, hello=False) as wire:
        reply = wire.ask(Ping(id=1))
        assert isinstance(reply, Failure) and "Hello" in reply.message
        assert wire.reply() is None


def test_a_client_that_says_nothing_is_disconnected(serve):
    daemon = serve(limits={"handshake": "50ms"})
    with Wire(daemon.address, hello=False) as wire:
        assert "0.05 s" in wire.reply().message
        assert wire.reply() is None


def test_an_id_that_is_in_use_ends_the_connection_and_its_work(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5]), Ping(id=2))
        replies = [wire.reply(), wire.reply()]
        assert [type(reply) for reply in replies] == [Failure, type(None)]
        assert (replies[0].id, replies[0].code) == (0, "protocol_error")
        wait_for(lambda: client.sessions()[0].state == "detached")


def test_a_frame_that_the_client_s_end_cuts_off_is_logged(serve):
    daemon = serve()
    with Wire(daemon.address) as wire:
        wire.send_bytes(encode(Ping(id=1))[:7])
    wait_for(lambda: "frame_truncated" in daemon.log)
    with daemon.client() as client:
        client.ping()


def test_too_many_unfinished_requests(serve):
    daemon = serve(gated=True, limits={"requests_per_connection": 3, "requests": 4})
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as other:
        client.load("djinn-tiny")
        sessions = [wire.ask(OpenSession(id=n, model="djinn-tiny")).session.id for n in range(5)]
        wire.send(*(Generate(id=n, session=sessions[n], token_ids=[5], max_tokens=1) for n in range(4)))
        reply = wire.reply()
        assert (reply.id, reply.code) == (3, "retry") and "this connection" in reply.message
        other.send(Generate(id=1, session=sessions[4], token_ids=[5], max_tokens=1))
        reply = other.ask(ListModels(id=2))
        assert (reply.id, reply.code) == (2, "retry") and "the daemon" in reply.message
        for each in (wire, other):
            assert each.ask(Ping(id=9)) == Done(id=9)
        assert other.ask(GetStatus(id=3)).state == "ready"
        assert other.ask(CloseSession(id=3, session=sessions[3])) == Done(id=3)
        daemon.step(10)
        assert {wire.reply().id for _ in range(3)} == {0, 1, 2}
        assert other.reply().id == 1
        assert other.ask(Ping(id=3)) == Done(id=3)


def test_too_many_unfinished_requests_of_one_user(serve):
    daemon = serve(gated=True, limits={"requests_per_user": 2})
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as other:
        client.load("djinn-tiny")
        sessions = [wire.ask(OpenSession(id=n, model="djinn-tiny")).session.id for n in range(2)]
        wire.send(*(Generate(id=n, session=sessions[n], token_ids=[5], max_tokens=1) for n in range(2)))
        wait_for(lambda: [use.used for use in client.quotas()[0].resources if use.name == "requests"] == [2])
        reply = other.ask(ListModels(id=1))
        assert (reply.id, reply.code) == (1, "quota_exceeded") and "limits.requests_per_user is 2" in reply.message
        assert other.ask(Ping(id=2)) == Done(id=2)
        daemon.step(10)
        assert {wire.reply().id for _ in range(2)} == {0, 1}
        assert other.ask(ListModels(id=3)).models


def test_too_many_connections_of_one_user(serve):
    daemon = serve(limits={"connections_per_user": 2})
    with Wire(daemon.address) as first, Wire(daemon.address) as second:
        with Wire(daemon.address, hello=False) as third:
            assert third.reply() is None
        assert first.ask(Ping(id=1)) == Done(id=1)
        assert second.ask(Ping(id=1)) == Done(id=1)
    wait_for(lambda: "too_many_connections" in daemon.log)


def test_descriptors_that_a_request_does_not_take_are_closed_and_it_is_refused(calm, wire):
    before = len(os.listdir(f"/proc/{calm.process.pid}/fd"))
    fd = os.memfd_create("unasked")
    for number in range(20):
        socket.send_fds(wire.socket, [encode(Ping(id=number), fds=4)], [fd] * 4)
        reply = wire.reply()
        assert (reply.id, reply.code) == (number, "invalid_request") and "4 descriptors" in reply.message
    os.close(fd)
    assert wire.ask(Ping(id=21)) == Done(id=21)
    assert len(os.listdir(f"/proc/{calm.process.pid}/fd")) == before


@pytest.mark.long
def test_a_client_that_does_not_read_is_held_and_others_continue(serve):
    """Its generation consists of many small pieces. It is held when they pile up, and continues when the client
    reads."""
    daemon = serve(Script(context=1 << 20))
    with daemon.client() as client, Wire(daemon.address) as slow, Wire(daemon.address) as quick:
        client.load("djinn-tiny")
        lazy = slow.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        eager = quick.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        total = 50_000
        slow.send(Generate(id=2, session=lazy, token_ids=[5], max_tokens=total, stream=True))
        wait_for(lambda: {s.id: s.state for s in client.sessions()}[lazy] == "held")
        assert len(quick.ask(Generate(id=2, session=eager, token_ids=[5], max_tokens=1000)).token_ids) == 1000
        held = {s.id: s.tokens for s in client.sessions()}[lazy]
        assert held < total
        replies = [slow.reply()]
        while isinstance(replies[-1], Piece):
            replies.append(slow.reply())
        assert sum(len(reply.token_ids) for reply in replies) == total
        assert replies[-1].finish_reason == "length"


def test_a_client_that_never_reads_is_disconnected(serve):
    daemon = serve(limits={"output_bytes": "64KiB"})
    with daemon.client() as client, Wire(daemon.address) as slow:
        client.load("djinn-tiny")
        session = slow.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        slow.ask(Generate(id=2, session=session, token_ids=[5] * 250, max_tokens=1))
        slow.socket.settimeout(PATIENCE / 2)  # the server may be slow to read, too
        try:
            for number in range(3, 100_000):
                slow.send(GetTokens(id=number, session=session))
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        wait_for(lambda: "client_too_slow" in daemon.log)
        wait_for(lambda: client.sessions()[0].attached == 0)


def test_a_client_killed_during_a_stream_leaves_its_session_for_the_grace_time(serve):
    daemon = serve(Script(context=1 << 20), limits={"session_grace": "100ms"})
    code = (
        "import sys, djinn_client as djinn; s = djinn.Session('djinn-tiny', address=sys.argv[1])\n"
        "for piece in s.stream([5], max_tokens=1 << 19): print(s.id, flush=True)"
    )
    with daemon.client() as client:
        command = [sys.executable, "-c", code, daemon.address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        wait_for(lambda: client.sessions() == [])
        status = client.status(check=True)
        assert status.integrity == [] and (status.requests_running, status.connections) == (0, 1)


def test_cancelling_an_unknown_request_does_nothing(wire):
    wire.send(Cancel(target=-1), Cancel(target=1 << 60))
    assert wire.ask(Ping(id=1)) == Done(id=1)


def test_hello_and_requests_in_one_piece(calm):
    with Wire(calm.address, hello=False) as wire:
        wire.send(Hello(id=0), Ping(id=1), Ping(id=2))
        assert [wire.reply().id for _ in range(3)] == [0, 1, 2]


# --- memory of connections --------------------------------------------------------------------------------------


def test_an_unfinished_frame_is_dropped_in_time_and_its_bytes_are_released(serve):
    daemon = serve(limits={"frame": "200ms"})
    with daemon.client() as client, Wire(daemon.address) as wire:
        wire.send_bytes(HEADER.pack(b"DJ", 1, 0, 16 << 20) + bytes(1 << 20))
        reply = wire.reply()
        assert isinstance(reply, Failure) and "0.2 s" in reply.message
        assert wire.reply() is None
        wait_for(lambda: used(client, "connection_bytes") == 0)


def test_large_frames_of_one_user_wait_for_room_and_all_are_answered(serve):
    """The senders have sent all but one byte. Two frames fit; the others come in when those have been handled."""
    daemon = serve(limits={"request_bytes": "1MiB", "connection_bytes_per_user": "2MiB"})
    frame = encode(AddFunction(id=7, session="nobody's", breakpoint=1, code=bytes(900 << 10), python=""))
    with daemon.client() as client, ExitStack() as stack:
        wires = [stack.enter_context(Wire(daemon.address)) for _ in range(6)]
        senders = [threading.Thread(target=wire.send_bytes, args=(frame[:-1],), daemon=True) for wire in wires]
        for sender in senders:
            sender.start()
        wait_for(lambda: used(client, "connection_bytes") == 2 * (len(frame) - HEADER.size))
        sent = 0
        while sent < len(wires):
            for wire, sender in zip(wires, senders, strict=True):
                if sender is not None and not sender.is_alive():
                    wire.send_bytes(frame[-1:])
                    assert wire.reply().code == "session_not_found"
                    senders[wires.index(wire)], sent = None, sent + 1
        wait_for(lambda: used(client, "connection_bytes") == 0)


def test_requests_are_postponed_while_their_client_does_not_read(serve):
    """They continue when it reads: each has its reply."""
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as slow:
        client.load("djinn-tiny")
        session = slow.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        slow.ask(Generate(id=2, session=session, token_ids=[5] * 250, max_tokens=1))
        count = 3000  # replies with 250 tokens each: about 2 MB of replies, and 100 KB of requests
        slow.send(*(GetTokens(id=number, session=session) for number in range(3, 3 + count)))
        wait_for(lambda: used(client, "connection_bytes") > 0)
        assert used(client, "connection_bytes") < 1 << 20
        assert sorted(slow.reply().id for _ in range(count)) == list(range(3, 3 + count))
        wait_for(lambda: used(client, "connection_bytes") == 0)


def test_before_hello_no_large_frame_comes_in(calm):
    with Wire(calm.address, hello=False) as wire:
        wire.send_bytes(HEADER.pack(b"DJ", 1, 0, (64 << 10) + 1))
        assert wire.reply().code == "frame_too_large"
        assert wire.reply() is None


def used(client, resource):
    (quota,) = client.quotas()
    return next(use.used for use in quota.resources if use.name == resource)
