from __future__ import annotations

import gc
import os
import socket
from types import SimpleNamespace

import pytest

from djinnd.messages import Report, SessionUse
from djinnd.server.status.audit import audit_descriptors, audit_engine, audit_tables


def world(**changes):
    """A daemon's tables without contradictions: one client, two sessions, one model."""
    client = FakeClient()
    idle = SimpleNamespace(id="idle", attached={client}, grace=None, call=None, kept=None)
    detached = SimpleNamespace(id="detached", attached=set(), grace=object(), call=None, kept=None)
    model = SimpleNamespace(name="m", engine=object(), changing=None, state="ready")
    arena = SimpleNamespace(models={"m"}, findings=list, is_complete=lambda name: name in arena.models)
    clients = Clients([client])
    return SimpleNamespace(
        client=client, idle=idle, detached=detached, model=model, arena=arena, clients=clients, **changes
    )


class FakeClient:
    def __init__(self, fd=-1):
        self.fd = fd
        self.calls = {}
        self.queued_fds = 0
        self.user = 1000


class Clients(list):
    unfinished = 0
    windows = 0

    def __init__(self, clients=()):
        super().__init__(clients)
        self.counted = {1000: len(self)} if self else {}


def findings(world):
    return list(audit_tables(world.clients, [world.idle, world.detached], [world.model], world.arena))


def test_consistent_tables_give_no_finding():
    assert findings(world()) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.idle.attached.add(object()), "session idle is attached to a connection that is gone"),
        (lambda w: setattr(w.idle, "grace", object()), "session idle has 1 connections and a wrong grace timer"),
        (lambda w: setattr(w.detached, "grace", None), "session detached has 0 connections and a wrong grace timer"),
        (
            lambda w: setattr(w.idle, "call", SimpleNamespace(client=w.client, whole=None)),
            "works for a request that has ended",
        ),
        (lambda w: w.client.calls.update({1: object()}), "1 requests are under way, 0 are counted"),
        (lambda w: w.clients.counted.update({1000: 2}), "connections by user are {1000: 1}, and {1000: 2} are counted"),
        (lambda w: setattr(w.model, "engine", None), "the arena holds blocks of m, which is not loaded"),
        (lambda w: setattr(w.arena, "findings", lambda: ["lost"]), "lost"),
    ],
)
def test_each_contradiction_is_found(spoil, words):
    there = world()
    spoil(there)
    (finding,) = findings(there)
    assert words in finding


def test_complete_weights_of_a_failed_load_are_kept_for_the_next_one():
    there = world()
    there.model.engine, there.model.state = None, "failed"
    assert findings(there) == []
    there.arena.is_complete = lambda name: False
    assert findings(there) == ["the arena holds blocks of m, which is not loaded"]


def test_sessions_of_server_and_engine_are_compared():
    def report(*names, found=()):
        uses = [SessionUse(name, "idle", 0, 0) for name in names]
        return Report(1, 0, 0, 0, 0, [], uses, findings=list(found))

    expected = [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    assert list(audit_engine(expected, report("a", "b"))) == []
    assert list(audit_engine(expected, report("a", "c", found=["a page is lost"]))) == [
        "session b is not known to the engine",
        "the engine has session c, which is closed",
        "a page is lost",
    ]


def own_memfds():
    """The memfds of this process, which other tests share. Garbage is collected first, so that none is closed during an
    audit."""
    gc.collect()
    folder = "/proc/self/fd"
    return {
        int(fd) for fd in os.listdir(folder) if os.path.islink(at := f"{folder}/{fd}") and "memfd:" in os.readlink(at)
    }


def test_a_connection_without_a_client_is_found(folder):
    address = f"{folder}/s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
        listener.bind(address)
        listener.listen()
        peer.connect(address)
        accepted, _ = listener.accept()
        with accepted:
            none = SimpleNamespace(windows=own_memfds())
            assert list(audit_descriptors(Clients([FakeClient(accepted.fileno())]), none, address)) == []
            (finding,) = audit_descriptors(Clients(), none, address)
            assert finding == f"descriptor {accepted.fileno()} is a connection of no client"


def test_stray_memfds_and_lost_weights_are_found():
    shared, stray = os.memfd_create("weights"), os.memfd_create("stray")
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(free := max(map(int, os.listdir("/proc/self/fd"))) + 1)
        sharing = SimpleNamespace(windows={free, *own_memfds()} - {stray})
        gone, memfds = audit_descriptors(Clients(), sharing, "/nobody's")  # a socket pair has the address ""
        assert gone == f"the weights in descriptor {free} are gone"
        assert memfds == "1 memfds are open, 0 wait to be sent"
    finally:
        os.close(shared)
        os.close(stray)
