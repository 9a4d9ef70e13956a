from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from djinnd.server.socket_path import SocketPath, StartError, inherited_listener

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(folder):
    return folder / "run" / "djinnd.sock"


def left(path):
    return [name.name for name in path.parent.iterdir()]


def test_the_path_is_claimed_with_its_folder_and_modes_and_left_clean(path):
    claim = SocketPath(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
    claim.release()
    assert left(path) == []


def test_a_second_claim_names_who_has_it(path):
    claim = SocketPath(str(path))
    with pytest.raises(StartError, match=rf"runs at .* already \(pid {os.getpid()}\)"):
        SocketPath(str(path))
    claim.release()
    SocketPath(str(path)).release()


def test_a_listener_without_the_lock_is_respected_and_named(path):
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(StartError, match=rf"something listens .* \(pid {os.getpid()}\)"):
            SocketPath(str(path))
    assert left(path) == ["djinnd.sock"], "its file stays, and no lock does"


def test_what_a_killed_daemon_left_is_replaced(path):
    code = "import sys; from djinnd.server.socket_path import SocketPath; SocketPath(sys.argv[1]); print(1); input()"
    command = [sys.executable, "-u", "-c", code, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(StartError, match=f"pid {other.pid}"):
            SocketPath(str(path))
        other.send_signal(signal.SIGKILL)
    assert sorted(left(path)) == ["djinnd.sock", "djinnd.sock.lock"]
    SocketPath(str(path)).release()
    assert left(path) == []


def test_a_file_that_is_no_socket_is_not_touched(path):
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(StartError, match="no socket"):
        SocketPath(str(path))
    assert path.read_text() == "precious"
    assert left(path) == ["djinnd.sock"]


def test_paths_that_cannot_be(folder):
    with pytest.raises(StartError, match="107 bytes"):
        SocketPath(str(folder / ("x" * 120)))
    (folder / "file").write_text("")
    with pytest.raises(StartError, match="--socket"):
        SocketPath(str(folder / "file" / "djinnd.sock"))


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}])
def test_nothing_is_inherited_that_is_not_for_this_process(environ):
    assert inherited_listener(dict(environ)) is None


def test_more_than_one_socket_is_an_error():
    with pytest.raises(StartError, match="2 sockets"):
        inherited_listener({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})


def test_what_systemd_passes_is_taken_and_hidden_from_children(folder):
    """In a process of its own, whose descriptor 3 is the socket."""
    code = """
import os, socket, sys
from djinnd.server.socket_path import inherited_listener, StartError
listener = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "listening":
    listener.bind(sys.argv[1])
    listener.listen()
os.dup2(listener.fileno(), 3)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "djinnd.socket", "HOME": "/"}
try:
    found = inherited_listener(environ)
    print(found.getsockname(), found.get_inheritable(), environ)
except StartError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(folder / "s.sock")]
    told = subprocess.run([*command, "listening"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{folder / 's.sock'} False {{'HOME': '/'}}"
    told = subprocess.run([*command, "unbound"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "something else than a listening Unix" in told
