"""KV that clients hand over: its faults harm the client that sent it, and no other."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.arguments.options import build
from djinn_client.handover.kv import KvWindow
from djinn_client.protocol import ImportSession, SessionOpened, encode
from djinn_client.transport.connection import connect
from djinn_client.transport.shm import FUTURE_WRITE, SEALS, new_window, seal_for_writers
from djinn_client.transport.steps import run
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.daemon import ROOT, Daemon, clean_environ, expect_held, holdings, wait_for
from tests.support.served import Wire

PROMPT = [300, 20, 101, 7, 55, 430, 12] * 40
NEW = 8


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start()
        with daemon.client() as client:
            client.load(MODEL)
        before = holdings(daemon)
        yield daemon
        expect_held(daemon, before)


@pytest.fixture
def kv(target: Daemon, request: pytest.FixtureRequest) -> Iterator[djinn.KV]:
    with djinn.Session(MODEL, address=target.address) as s:
        s.generate(PROMPT, max_tokens=NEW, ignore_eos=True)
        yield s.kv()
        request.node.funcargs.clear()  # pytest keeps them after the module's last test, and a kept window counts


def hand_over(daemon: Daemon, given: djinn.KV, fd: int, **changes: Any) -> str:
    """Imports a session with this window. Returns the error's code, or an empty string; then the session is closed
    again."""
    fields: dict[str, Any] = {"token_ids": given.tokens, "kv": given.layout, "kv_tokens": given.length} | changes
    connection = run(connect(daemon.address))
    try:
        request = build(ImportSession, model=MODEL, **fields)
        opened = run(connection.call(request, SessionOpened, fds=[fd] if fd >= 0 else []))
        with daemon.client() as client:
            client.close_session(opened.message.session.id)
    except djinn.DjinnError as error:
        return error.code
    finally:
        connection.close()
        if fd >= 0:
            os.close(fd)
    return ""


def bare(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def whole(nbytes: int) -> int:
    fd = new_window("whole", nbytes)
    seal_for_writers(fd)
    return fd


@pytest.mark.smoke
def test_forged_windows_are_refused(target: Daemon, kv: djinn.KV) -> None:
    nbytes = kv.layout.nbytes(kv.length)
    with Bystander(target.address):
        for name, fd, changes in (
            ("not sealed", bare(nbytes, 0), {}),
            ("may shrink", bare(nbytes, fcntl.F_SEAL_GROW | FUTURE_WRITE), {}),
            ("may be punched", new_window("punched", nbytes), {}),
            ("holes", bare(nbytes, SEALS | FUTURE_WRITE), {}),
            ("too short", whole(nbytes - 1), {}),
            ("too long", whole(nbytes + 4096), {}),
            ("empty", whole(4096), {"kv_tokens": 0}),
            ("no descriptor", -1, {}),
            ("no memfd", os.open("/dev/zero", os.O_RDWR), {}),
            ("a socket", socket.socket().detach(), {}),
            ("KV of more than there is", whole(kv.layout.nbytes(1 << 20)), {"kv_tokens": 1 << 20}),
            ("a negative count", whole(nbytes), {"kv_tokens": -5}),
            ("no form", whole(nbytes), {"kv": None}),
            ("another form", whole(nbytes), {"kv": djinn.KvLayout("float16", 8, 512, 2, 32)}),
            ("no tokens", whole(nbytes), {"token_ids": []}),
            ("another model", whole(nbytes), {"fingerprint": "0" * 64}),
        ):
            wanted = {"another model": "model_mismatch"}.get(name, "invalid_request")
            assert hand_over(target, kv, fd, **changes) == wanted, name
        assert hand_over(target, kv, whole(nbytes)) == ""


def test_a_client_that_writes_to_its_window_harms_only_itself(target: Daemon, kv: djinn.KV) -> None:
    window = KvWindow(kv.layout, kv.length)
    with Bystander(target.address):
        for _ in range(10):
            window.pages[:] = float("nan")
            with djinn.Session.from_kv(MODEL, kv.tokens or [], window, address=target.address) as s:
                for act in (lambda: os.ftruncate(window.fd, 0), lambda: os.pwrite(window.fd, b"x", 0)):
                    with suppress(PermissionError):
                        act()
                with pytest.raises(djinn.DjinnError, match="no numbers"):
                    s.generate([7], max_tokens=2)


def test_a_client_that_disconnects_during_an_import(target: Daemon, kv: djinn.KV) -> None:
    fd = whole(kv.layout.nbytes(kv.length))
    for cut in (None, 30):
        with Wire(target.address) as wire:
            request = ImportSession(id=7, model=MODEL, token_ids=kv.tokens or [], kv=kv.layout, kv_tokens=kv.length)
            socket.send_fds(wire.socket, [encode(request, 1)[:cut]], [fd])
    os.close(fd)
    with target.client() as client:
        close_left(client, connections=2)  # one is of the session that the KV came from


EXPORT_FOREVER = """
import sys
import djinn_client as djinn
s = djinn.Session("djinn-tiny", address=sys.argv[1])
s.generate(list(range(1, 300)), max_tokens=2)
print(s.id, flush=True)
while True:
    djinn.Session.from_kv("djinn-tiny", s.token_ids(), s.kv(), address=sys.argv[1]).close()
"""


def test_a_client_killed_during_exports_and_imports(target: Daemon) -> None:
    with Bystander(target.address), target.client() as client:
        for _ in range(3):
            command = [sys.executable, "-c", EXPORT_FOREVER, target.address]
            with subprocess.Popen(command, cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline()
                steps = client.status().devices[0].steps
                wait_for(lambda before=steps: client.status().devices[0].steps > before + 5)
                process.send_signal(signal.SIGKILL)
            close_left(client, connections=2)


def close_left(client: djinn.Client, connections: int) -> None:
    """Closes the sessions of clients that have gone, when the daemon has noticed: `connections` are left then."""
    wait_for(lambda: client.status().connections == connections)
    for info in client.sessions():
        if not info.attached:
            with suppress(djinn.SessionNotFound):  # the daemon closes a session with an unfinished import
                client.close_session(info.id)


def test_a_session_with_a_client_s_kv_is_lost_with_the_engine(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon(errors=["engine_lost"])
    with djinn.Session(MODEL, address=daemon.address) as s:
        first = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
        kv = s.kv()
        foreign = djinn.Session.from_kv(MODEL, kv.tokens or [], kv, address=daemon.address)
        fork = foreign.fork()
        restarts = daemon.device().restarts
        daemon.kill_engine()
        wait_for(lambda: daemon.device().restarts > restarts)
        for lost in (foreign, fork):
            for call in (lambda s=lost: s.generate([7]), lambda s=lost: s.kv(), lambda s=lost: s.fork()):
                with pytest.raises(djinn.SessionLost, match="read its tokens"):
                    call()
            assert lost.token_ids() == [*PROMPT, *first]
            lost.truncate(5)
            assert lost.token_ids() == PROMPT[:5]
        with djinn.Session.from_kv(MODEL, kv.tokens or [], kv, address=daemon.address) as again:
            assert (
                again.generate(max_tokens=4, ignore_eos=True).token_ids
                == s.generate(max_tokens=4, ignore_eos=True).token_ids
            )
        with daemon.client() as client:
            assert client.status(check=True).integrity == []
        foreign.close()
        fork.close()


def test_the_next_daemon_does_not_have_such_a_session(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    with djinn.Session(MODEL, address=daemon.address) as s:
        s.generate(PROMPT, max_tokens=NEW, ignore_eos=True)
        kv = s.kv()
    foreign = djinn.Session.from_kv(MODEL, kv.tokens or [], kv, address=daemon.address)
    foreign.generate([5], max_tokens=2)
    kept = djinn.Session(MODEL, address=daemon.address)
    with daemon.client() as client:
        client.restart(warm=True)
    for session in (foreign, kept):
        session.detach()
    wait_for(lambda: is_back(daemon, kept.id))
    with pytest.raises(djinn.SessionNotFound):
        djinn.Session.attach(foreign.id, address=daemon.address)


def is_back(daemon: Daemon, session: str) -> bool:
    try:
        djinn.Session.attach(session, address=daemon.address).close()
    except (djinn.ConnectionLost, djinn.Retry):
        return False
    return True
