from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from djinnd.messages import Report, SessionUse
from djinnd.server.audit import audit_descriptors, audit_engine, audit_tables


def world(**changes):
    """A daemon's tables in order: one client, two sessions, one model."""
    client = FakeClient()
    idle = SimpleNamespace(id="idle", attached={client}, grace=None, call=None)
    detached = SimpleNamespace(id="detached", attached=set(), grace=object(), call=None)
    model = SimpleNamespace(name="m", engine=object(), changing=None)
    arena = SimpleNamespace(models={"m"}, findings=list)
    clients = Clients([client])
    return SimpleNamespace(
        client=client, idle=idle, detached=detached, model=model, arena=arena, clients=clients, **changes
    )


class FakeClient:
    def __init__(self, fd=-1):
        self.fd = fd
        self.calls = {}
        self.queued_fds = 0


class Clients(list):
    unfinished = 0


def findings(world):
    return list(audit_tables(world.clients, [world.idle, world.detached], [world.model], world.arena))


def test_tables_in_order():
    assert findings(world()) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.idle.attached.add(object()), "session idle is attached to a connection that is gone"),
        (lambda w: setattr(w.idle, "grace", object()), "session idle has 1 connections and a wrong grace timer"),
        (lambda w: setattr(w.detached, "grace", None), "session detached has 0 connections and a wrong grace timer"),
        (lambda w: setattr(w.idle, "call", SimpleNamespace(client=w.client)), "at work for a request that is over"),
        (lambda w: w.client.calls.update({1: object()}), "1 requests are under way, 0 are counted"),
        (lambda w: setattr(w.model, "engine", None), "the arena holds blocks of m, which is not loaded"),
        (lambda w: setattr(w.arena, "findings", lambda: ["lost"]), "lost"),
    ],
)
def test_each_thing_that_is_out_of_order_is_found(spoil, words):
    there = world()
    spoil(there)
    (finding,) = findings(there)
    assert words in finding


def test_sessions_of_server_and_engine_are_compared():
    def report(*names, found=()):
        uses = [SessionUse(name, "idle", 0, 0) for name in names]
        return Report(1, 0, 0, 0, 0, 0, 0, [], uses, list(found))

    expected = [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    assert list(audit_engine(expected, report("a", "b"))) == []
    assert list(audit_engine(expected, report("a", "c", found=["a page is lost"]))) == [
        "session b is not known to the engine",
        "the engine has session c, which is closed",
        "a page is lost",
    ]


def test_a_connection_that_no_client_has_is_found(folder):
    address = f"{folder}/s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
        listener.bind(address)
        listener.listen()
        peer.connect(address)
        accepted, _ = listener.accept()
        with accepted:
            assert list(audit_descriptors(Clients([FakeClient(accepted.fileno())]), address)) == []
            (finding,) = audit_descriptors(Clients(), address)
            assert finding == f"descriptor {accepted.fileno()} is a connection of no client"
