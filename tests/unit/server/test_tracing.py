"""A trace, from the request to its final reply. The scripted engine records one span per step."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinn_client.protocol import Cancel, Failure, Generate, GetTrace, OpenSession, Ping, Span, TraceReply
from tests.support.served import Wire


def test_the_next_steps_are_traced(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire, Wire(daemon.address) as tracing:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        tracing.send(GetTrace(id=5, steps=2, seconds=60))
        tracing.ask(Ping(id=6))
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=4))
        daemon.step(4)
        spans = [Span("step", "step", 0.0, 1e3), Span("step", "step", 1e3, 1e3)]
        assert tracing.reply() == TraceReply(id=5, device="cpu", spans=spans)
        assert len(wire.reply().token_ids) == 4


def test_an_idle_engine_answers_when_the_time_is_up(calm):
    reply = djinn.trace(seconds=0.05, address=calm.address)
    assert (reply.device, reply.spans) == ("cpu", [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be from 1 to 100"),
        ({"steps": 101}, "steps is 101"),
        ({"seconds": 0}, "seconds is 0; it must be more than 0 and at most 60"),
        ({"seconds": 61}, "seconds is 61"),
        ({"seconds": float("nan")}, "seconds is nan"),
    ],
)
def test_invalid_traces_are_refused(calm, fields, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        djinn.trace(address=calm.address, **fields)


def test_one_trace_at_a_time_also_if_the_first_client_has_gone(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as first, Wire(daemon.address) as second:
        client.load("djinn-tiny")
        first.send(GetTrace(id=1, seconds=60))
        first.ask(Ping(id=2))  # the trace has been requested
        refused = second.ask(GetTrace(id=1, seconds=60))
        assert isinstance(refused, Failure) and refused.code == "retry"
        first.send(Cancel(target=1))
        assert first.reply().code == "cancelled"
        assert second.ask(GetTrace(id=2, seconds=60)).code == "retry", "the engine still records the first trace"


def test_the_engine_dies_during_a_trace(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        wire.send(GetTrace(id=1, seconds=60))
        wire.ask(Ping(id=2))
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        reply = wire.reply()
        assert isinstance(reply, Failure) and (reply.id, reply.code) == (1, "engine_lost")
        assert djinn.trace(seconds=0.05, address=daemon.address).spans == []
