from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from djinnd.server.handover.socket_path import SocketPath, StartError, listen

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(folder):
    return folder / "run" / "djinnd.sock"


def left(path):
    return [name.name for name in path.parent.iterdir()]


def test_the_path_is_claimed_with_folder_and_modes_and_removed_afterwards(path):
    claim = SocketPath(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
    claim.release()
    assert left(path) == []


def test_a_second_claim_names_the_owner(path):
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
    assert left(path) == ["djinnd.sock"], "its file stays, and the lock file does not"


def test_the_socket_of_a_killed_daemon_is_replaced(path):
    code = (
        "import sys; from djinnd.server.handover.socket_path import SocketPath; "
        "SocketPath(sys.argv[1]); print(1); input()"
    )
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


def test_impossible_paths_are_refused(folder):
    with pytest.raises(StartError, match="107 bytes"):
        SocketPath(str(folder / ("x" * 120)))
    (folder / "file").write_text("")
    with pytest.raises(StartError, match="--socket"):
        SocketPath(str(folder / "file" / "djinnd.sock"))


def test_the_path_is_claimed_if_nothing_is_inherited(path):
    claim, listener = listen(str(path), [])
    assert claim is not None and listener is claim.listener
    claim.release()


# Runs in a process of its own. Its descriptors from 3 on are those that it was given.
GIVEN = """
import os, socket, sys
from djinnd.server.handover.socket_path import SocketPath, StartError, listen
from djinnd.server.handover.succession import inherited
listener = socket.socket(socket.AF_UNIX)
if sys.argv[2] != "unbound":
    listener.bind(sys.argv[1])
    listener.listen()
count = 2 if sys.argv[2] == "two" else 1
for fd in range(3, 3 + count):
    os.dup2(listener.fileno(), fd)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": "djinnd.socket"}
try:
    claim, found = listen("/not/this/one", inherited(environ))
    print(claim, found.getsockname(), found.get_inheritable(), environ)
except StartError as error:
    print(error)
"""


def told_with(folder, what):
    command = [sys.executable, "-c", GIVEN, str(folder / "s.sock"), what]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_a_socket_from_systemd_is_taken_and_hidden_from_children(folder):
    assert told_with(folder, "listening") == f"None {folder / 's.sock'} False {{}}"


def test_wrong_descriptors_from_systemd_are_refused(folder):
    assert "something else than a listening Unix" in told_with(folder, "unbound")
    assert "systemd passed 2 sockets" in told_with(folder, "two")


# Daemons one after another. Each claims a path (its next argument), describes itself and is succeeded. The last one
# releases its path.
CHAIN = """
import os, sys
from djinnd.server.handover.socket_path import listen
from djinnd.server.handover.succession import inherited, succeed
path, *more = sys.argv[1].split(",")
inode = lambda path: os.stat(path).st_ino
claim, listener = listen(path, inherited(os.environ))
print(os.getpid(), listener.getsockname(), inode(path), inode(path + ".lock"), flush=True)
try:
    listen(path, [])
except Exception as error:
    print("second:", error, flush=True)
sys.stdin.readline()
if more:
    sys.orig_argv[-1] = ",".join(more)
    succeed(claim.hand_over())
claim.release()
"""


def chain(*paths):
    command = [sys.executable, "-c", CHAIN, ",".join(map(str, paths))]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_successor_has_the_same_socket_and_the_claim_is_never_free(path):
    with chain(path, path, path) as process:
        first = process.stdout.readline()
        refusal = process.stdout.readline()
        assert f"runs at {path} already (pid {process.pid})" in refusal
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(path))
            for _ in range(2):
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == first
                assert process.stdout.readline() == refusal
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert left(path) == []


def test_a_successor_at_another_path_gives_up_the_old_one(path):
    elsewhere = path.parent / "elsewhere.sock"
    with chain(path, elsewhere) as process:
        process.stdout.readline()
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        assert str(elsewhere) in process.stdout.readline()
        assert sorted(left(path)) == ["elsewhere.sock", "elsewhere.sock.lock"]
        process.communicate("\n", timeout=30)
    assert left(path) == []
