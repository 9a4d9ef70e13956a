"""Confined processes: each test runs a child process, without torch, and checks its rights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from djinnd.config.principals import number_of
from tests.support.confined import confined
from tests.support.daemon import ROOT

pytestmark = confined

NOBODY = 65534
CLOSED = """
import ctypes, json, mmap, os, socket, sys, threading
from djinnd.confinement import sandbox
out = int(sys.argv[1])
assert sandbox.missing() == ""
sandbox.close(int(sys.argv[2]), os.getppid(), 64 << 20)
def tell(value):
    os.write(out, json.dumps(value).encode())
"""


def closed(body: str, user: int = os.geteuid()) -> tuple[int, object]:
    """Runs `body` in a confined child → its exit status, and the value that it passed to `tell`."""
    ours, theirs = os.pipe()
    script = CLOSED + textwrap.dedent(body)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", script, str(theirs), str(user)],
            pass_fds=[theirs],
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    finally:
        os.close(theirs)
    with open(ours, "rb") as told:
        text = told.read()
    return ended.returncode, json.loads(text) if text else None


@pytest.mark.parametrize(
    "call",
    [
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "threading.Thread(target=print).start()",
        "socket.socket()",
        "socket.socketpair()",
        "os.kill(os.getppid(), 0)",
        "os.memfd_create('x')",
        "ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
        "ctypes.CDLL(None).syscall(ctypes.c_long(425), 8, None)",
    ],
)
def test_forbidden_calls_kill_the_process(call: str) -> None:
    assert closed(f"{call}\ntell('alive')") == (-signal.SIGSYS, None)


def test_computing_is_allowed_and_files_and_large_memory_are_refused() -> None:
    status, told = closed(
        """
        def outcome(act):
            try:
                act()
            except (PermissionError, FileNotFoundError):  # as the machine lets it have a root folder of its own
                return "refused"
            except Exception as error:
                return type(error).__name__
            return "done"
        def read(path):
            with open(path) as file:
                file.read()
        def write(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        fcntl = __import__("fcntl")
        tell({
            "compute": outcome(lambda: sum(range(1000))),
            "import": outcome(lambda: __import__("colorsys")),
            "allocate": outcome(lambda: bytearray(32 << 20)),
            "print": outcome(lambda: print("nobody sees it", flush=True)),
            "too much": outcome(lambda: bytearray(128 << 20)),
            "too much, shared": outcome(lambda: mmap.mmap(-1, 128 << 20)),
            "passwd": outcome(lambda: read("/etc/passwd")),
            "its parent's environment": outcome(lambda: read(f"/proc/{os.getppid()}/environ")),
            "temporary": outcome(lambda: write("/tmp/djinnd-sandbox")),
            "shared memory": outcome(lambda: write("/dev/shm/djinnd-sandbox")),
            "list": outcome(lambda: os.listdir("/")),
            "owner of signals": outcome(lambda: fcntl.fcntl(out, 8, os.getppid())),
            "untie": ctypes.CDLL(None).prctl(1, 0, 0, 0, 0),
        })
        """
    )
    assert status == 0
    assert told == {
        "compute": "done",
        "import": "done",
        "allocate": "done",
        "print": "done",
        "too much": "MemoryError",
        "too much, shared": "OSError",
        "passwd": "refused",
        "its parent's environment": "refused",
        "temporary": "refused",
        "shared memory": "refused",
        "list": "refused",
        "owner of signals": "OSError",
        "untie": -1,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount wherever it is")
@pytest.mark.parametrize("user", [os.geteuid(), NOBODY])
def test_files_that_it_may_not_read_are_invisible(user: int) -> None:
    status, told = closed(
        """
        def outcome(act):
            try:
                return str(act())
            except OSError as error:
                return type(error).__name__
        tell({
            "passwd": outcome(lambda: os.stat("/etc/passwd").st_size),
            "its parent": outcome(lambda: os.stat(f"/proc/{os.getppid()}").st_size),
            "up": outcome(lambda: os.stat("../../../etc/passwd").st_size),
            "python": outcome(lambda: os.stat(os.__file__).st_size > 0),
            "mount": ctypes.CDLL(None).syscall(ctypes.c_long(161), b"/") if os.uname().machine == "x86_64" else -1,
        })
        """,
        user,
    )
    assert status == 0
    assert told == {
        "passwd": "FileNotFoundError",
        "its parent": "FileNotFoundError",
        "up": "FileNotFoundError",
        "python": "True",
        "mount": -1,
    }


def test_a_process_may_abort() -> None:
    assert closed("os.abort()") == (-signal.SIGABRT, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("principal", [NOBODY, number_of("ci")])
def test_root_becomes_the_tenant_or_nobody(principal: int) -> None:
    status, told = closed("tell([os.getuid(), os.geteuid(), os.getgid(), os.getegid()])", user=principal)
    assert (status, told) == (0, [NOBODY] * 4)


def test_a_process_with_two_threads_cannot_be_confined() -> None:
    body = """
    import os, threading
    from djinnd.confinement import sandbox
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(sandbox.missing(), flush=True)
    os._exit(0)
    """
    told = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(body)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout == "one thread, but has 2\n"
