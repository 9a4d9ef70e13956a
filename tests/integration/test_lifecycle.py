"""The start and the end of the daemon: its socket, systemd's notifications, and signals."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

import djinn_client as djinn
from djinn_client.protocol import Failure, Generate, Generated, OpenSession, Piece, SessionOpened
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, wait_for
from tests.support.served import Wire


def streaming(daemon: Daemon, wire: Wire, tokens: int) -> str:
    """Begins a stream, and returns its session."""
    opened = wire.ask(OpenSession(id=1, model=MODEL))
    while not isinstance(opened, SessionOpened):
        opened = wire.reply()
    request = Generate(id=2, session=opened.session.id, text="def f(", max_tokens=tokens, ignore_eos=True, stream=True)
    assert isinstance(wire.ask(request), Piece)
    return opened.session.id


def last_of(wire: Wire) -> Generated | Failure:
    while isinstance(reply := wire.reply(), Piece):
        pass
    assert isinstance(reply, Generated | Failure)
    return reply


def test_sigterm_lets_requests_under_way_finish(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    with Wire(daemon.address) as busy, Wire(daemon.address) as idle:
        streaming(daemon, busy, tokens=300)
        engine = daemon.device().pid
        os.kill(engine, signal.SIGSTOP)  # so that a request is still under way
        daemon.signal(signal.SIGTERM)
        daemon.wait_until_told(lambda told: told.get("STOPPING") == "1")
        refused = idle.ask(OpenSession(id=1, model=MODEL))
        os.kill(engine, signal.SIGCONT)
        assert isinstance(refused, Failure)
        assert refused.code == "shutting_down"
        last = last_of(busy)
        assert isinstance(last, Generated)
        assert (last.finish_reason, last.usage.generated_tokens) == ("length", 300)
        assert busy.reply() is None  # all replies were sent
    assert daemon.wait() == 0
    assert daemon.left_behind() == []


def test_a_second_sigterm_ends_it_at_once(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"shutdown_grace": "1h"}})
    with Wire(daemon.address) as busy, daemon.client() as client:
        streaming(daemon, busy, tokens=1900)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: client.status().state == "draining")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.left_behind() == []


@pytest.mark.long
def test_the_successor_of_a_killed_daemon(start_daemon: DaemonStarter) -> None:
    """The successor adopts the killed daemon's objects. While it lives, no other daemon gets its socket."""
    killed = start_daemon()
    djinn.load(MODEL, address=killed.address)
    assert killed.shared_memory()
    killed.kill()
    assert os.path.exists(killed.address)

    successor = start_daemon({"socket": killed.address, "state_dir": str(killed.folder / "state")})
    assert "arena_adopted" in successor.log
    with djinn.Session(MODEL, address=killed.address) as s:
        assert len(s.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2
        late = start_daemon({"socket": killed.address}, ready=False)
        assert late.wait() == 1
        assert f"a daemon runs at {killed.address} already (pid {successor.pid}): stop it, or use --socket" in late.log
        assert len(s.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2
    successor.signal(signal.SIGTERM)
    assert successor.wait() == 0
    assert killed.left_behind() == []


# systemd does this for a service with a socket: the listener is descriptor 3, and LISTEN_PID the service's pid.
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="djinnd.socket")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.long
def test_as_a_service_of_systemd(start_daemon: DaemonStarter) -> None:
    folder = start_daemon.folder()
    address = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        wrapper = [sys.executable, "-c", ACTIVATE, str(listener.fileno())]
        daemon = start_daemon(
            wrapper=wrapper,
            pass_fds=[listener.fileno()],
            environ={"WATCHDOG_USEC": "600000", "DJINND_MEMORY": "200MiB"},
            flags=["--memory", "300MiB"],
            ready=False,
        )
        with Wire(address):  # long before the daemon is ready
            daemon.wait_until_ready()
        with djinn.Client(address) as client:
            assert client.status().address == address
            client.load(MODEL)
            assert client.status().devices[0].budget_bytes == 300 << 20  # the flag has precedence
        assert not os.path.exists(daemon.address)  # it uses systemd's socket
        daemon.wait_until_told(lambda told: told.get("STATUS", "").startswith("starting"))
        daemon.wait_until_told(lambda told: "models: djinn-tiny" in told.get("STATUS", ""))
        beats = sum("WATCHDOG" in told for told in daemon.notifications)
        wait_for(lambda: sum("WATCHDOG" in told for told in daemon.notifications) >= beats + 3)
        daemon.signal(signal.SIGTERM)
        daemon.wait_until_told(lambda told: told.get("STOPPING") == "1")
        assert daemon.wait() == 0
        assert os.path.exists(address)  # the file belongs to systemd
    assert daemon.left_behind() == []
