"""Arbitrary bytes on a real connection: one client's bytes do not prevent another client from being served."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djinn_client.protocol import (
    AttachSession,
    Cancel,
    CloseSession,
    Done,
    Failure,
    ForkSession,
    Forward,
    Generate,
    GetStatus,
    GetTokens,
    Hello,
    ListModels,
    ListSessions,
    OpenSession,
    Partial,
    PauseSession,
    Ping,
    ResumeSession,
    Signal,
    Truncate,
    encode,
)
from tests.support.served import Wire, encode_payload, wait_for

LESS = ("ping", "open", "truncate")  # these have fewer fields than generate
RELAXED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

ids = st.integers(-(1 << 63), (1 << 64) - 1)
small = st.integers(0, 3)
sessions = st.sampled_from(["", "0123456789abcdef", "s" * 5000]) | st.text(max_size=5)
# A longer one ends the connection.
signalled = st.sampled_from(["", "0123456789abcdef", "s" * 4096]) | st.text(max_size=5)
tokens = st.lists(st.integers(0, 3000), max_size=5)

requests = st.one_of(
    st.builds(Hello, id=small),
    st.builds(Ping, id=ids),
    st.builds(OpenSession, id=small, model=st.sampled_from(["djinn-tiny", "", "/", "a/../b", "x" * 5000])),
    st.builds(AttachSession, id=small, session=sessions),
    st.builds(CloseSession, id=small, session=sessions),
    st.builds(ForkSession, id=small, session=sessions),
    st.builds(Generate, id=small, session=sessions, token_ids=tokens, max_tokens=ids),
    st.builds(Forward, id=small, session=sessions, token_ids=tokens),
    st.builds(Truncate, id=small, session=sessions, length=ids),
    st.builds(GetTokens, id=small, session=sessions),
    st.builds(Cancel, target=st.integers(-(1 << 63), (1 << 63) - 1)),  # a number outside of 64 bits ends the connection
    st.builds(Signal, session=signalled, kind=st.text(max_size=9), expected_s=st.floats()),
    st.builds(PauseSession, id=small, session=sessions, tier=st.sampled_from(["device", "host", "disk"])),
    st.builds(ResumeSession, id=small, session=sessions),
    st.builds(ListModels, id=small),
    st.builds(ListSessions, id=small),
    st.builds(GetStatus, id=small, check=st.booleans()),
)
plain = st.none() | st.booleans() | ids | st.floats(allow_nan=True) | st.text(max_size=5) | st.binary(max_size=5)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
kinds = st.sampled_from(
    ["ping", "open", "generate", "forward", "cancel", "signal", "pause", "status", "hello", "no such"]
)
keys = st.sampled_from(["id", "session", "model", "text", "token_ids", "sampling", "target", "stop", "length", "kind"])
near = st.builds(lambda kind, fields: {"type": kind, **fields}, kinds, st.dictionaries(keys, values))
chunks = st.one_of(
    st.binary(max_size=50),
    requests.map(encode),
    st.binary(max_size=50).map(encode_payload),
    (values | near).map(msgspec.msgpack.encode).map(encode_payload),
)


def assert_served(daemon):
    with Wire(daemon.address) as wire:
        assert wire.ask(Ping(id=1)) == Done(id=1)


@RELAXED
@given(said=st.lists(chunks, max_size=8), hello=st.booleans(), cut=st.integers(0, 400))
def test_no_bytes_stop_the_daemon(calm, said, hello, cut):
    with Wire(calm.address, hello) as wire, suppress(BrokenPipeError):  # it has hung up
        wire.send_bytes(b"".join(said)[:cut])
    assert_served(calm)


@RELAXED
@given(asked=st.lists(requests, max_size=12, unique_by=lambda request: getattr(request, "id", None)))
def test_every_request_gets_exactly_one_final_reply(calm, asked):
    """Each request has an id of its own. A last one shows when all others must have been answered."""
    expected = [request.id for request in asked if not isinstance(request, Cancel | Signal)]
    with Wire(calm.address) as wire:
        wire.send(*asked)
        finals = []
        while len(finals) < len(expected):
            reply = wire.reply()
            assert reply is not None, "the daemon hung up on well-formed requests"
            if not isinstance(reply, Partial):
                finals.append(reply.id)
        last = next(number for number in range(100) if number not in expected)
        assert wire.ask(Ping(id=last)) == Done(id=last)
    assert sorted(finals) == sorted(expected)


@RELAXED
@given(fields=st.dictionaries(keys, values), number=st.integers(0, 1 << 60))
@pytest.mark.parametrize("kind", ["generate", *(pytest.param(kind, marks=pytest.mark.long) for kind in LESS)])
def test_a_request_with_any_fields_is_answered_under_its_id(calm, kind, fields, number):
    with Wire(calm.address) as wire:
        wire.send_payload(msgspec.msgpack.encode({"type": kind, **fields, "id": number}))
        reply = wire.reply()
        while isinstance(reply, Partial):
            reply = wire.reply()
        assert reply.id == number
        assert isinstance(reply, Failure) or kind in ("ping", "open")
    assert_served(calm)


def test_the_daemon_passes_its_audit_afterwards(calm):
    with calm.client() as client:
        wait_for(lambda: client.status().connections == 1)
        status = client.status(check=True)
        assert status.integrity == []
        assert status.devices[0].restarts == 0
