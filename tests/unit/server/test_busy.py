"""A full queue of requests: which ones are refused, and when there is room again."""

from __future__ import annotations

import pytest

from djinn_client.protocol import Cancel, Done, Failure, Generate, Generated, OpenSession, Ping, Progress
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.served import Wire

MODEL = "djinn-tiny"


@pytest.fixture
def daemon(serve):
    """A daemon that takes a step when the test says so, and has two places in its queue."""
    daemon = serve(gated=True, limits={"queue": 2})
    open_to_all(daemon.folder, daemon.address)
    return daemon


def sessions(wire, count):
    found = []
    while len(found) < count:
        reply = wire.ask(OpenSession(id=1, model=MODEL))
        while isinstance(reply, Progress):
            reply = wire.reply()
        found.append(reply.session.id)
    return found


def call(wire, number, session, max_tokens=1):
    """Sends a call that stays unanswered."""
    wire.send(Generate(id=number, session=session, token_ids=[5], max_tokens=max_tokens, ignore_eos=True))
    assert wire.ask(Ping(id=99)) == Done(id=99)


def refused(wire, session):
    reply = wire.ask(Generate(id=50, session=session, token_ids=[5], max_tokens=1, ignore_eos=True))
    assert isinstance(reply, Failure) and reply.code == "busy", reply
    return reply.data


def test_one_request_too_many_is_refused(daemon):
    with Wire(daemon.address) as wire:
        first, second, third = sessions(wire, 3)
        call(wire, 2, first, max_tokens=2)
        call(wire, 3, second)
        assert refused(wire, third) == {"waiting": 2, "own": 2, "limit": 2, "retry_s": 30.0}
        daemon.step()  # both have started, and one continues
        assert isinstance(wire.reply(), Generated)
        call(wire, 4, third)
        call(wire, 5, second)
        assert wire.ask(Generate(id=51, session=third, token_ids=[5])).code == "session_busy"
        daemon.step(2)
        assert sorted(wire.reply().id for _ in range(3)) == [2, 4, 5]


def test_a_cancelled_request_leaves_the_queue(daemon):
    with Wire(daemon.address) as wire:
        first, second, third = sessions(wire, 3)
        call(wire, 2, first)
        call(wire, 3, second)
        refused(wire, third)
        wire.send(Cancel(target=2))
        assert wire.reply().finish_reason == "cancelled"
        call(wire, 4, third)
        refused(wire, first)
        daemon.step()
        assert sorted(wire.reply().id for _ in range(2)) == [3, 4]


@only_root
def test_one_user_s_requests_do_not_fill_the_queue_for_others(daemon):
    with Wire(daemon.address) as hog:
        for number, session in enumerate(sessions(hog, 2)):
            call(hog, number + 2, session)
        with as_user():
            other = Wire(daemon.address)
        with other:
            mine, second = sessions(other, 2)
            call(other, 2, mine)
            assert refused(other, second)["own"] == 1
            daemon.step()
            assert isinstance(other.reply(), Generated)
