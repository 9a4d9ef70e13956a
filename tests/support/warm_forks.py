"""Forks processes from one that has imported engines and their libraries. The imports take most of the four seconds of
processor time of a start, and tests start hundreds of processes that need them.

    this process ──its log──► warm_forks ──fork──► fork_server ──fork──► engine
                                                    ▲
    this process ──starts, with the fork server's socket and pidfd──► daemon

A daemon takes over a fork server as it would from a predecessor. A command under test that starts processes by
sys.executable gets forks too, if `WarmForks.python` is its sys.executable: see warm_python.py, and warm_command.py for
the fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from djinnd.engine import fork_server
from djinnd.lifeline import tie_to
from tests.support import warm_command
from tests.support.warm_python import FORK_SERVER, ask_for_fork_server

ROOT = Path(__file__).resolve().parents[2]


class ForkServer(NamedTuple):
    """A fork server without a daemon. It ends when no process has its socket."""

    pid: int
    socket: int
    pidfd: int


class WarmForks:
    """Owns the process. The libraries are imported with `environ`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="djinnd-warm-forks-", dir="/tmp"))  # no other user may enter
        self._address = str(self._folder / "socket")
        self.python = self._folder / "python"
        self._write_python()
        self._lifeline, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)
            listener.listen()
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_forks", *map(str, fds), str(os.getpid()), str(self.python)],
                env=dict(environ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        atexit.register(self._close)

    def fork_server(self, log: int) -> ForkServer:
        """Its output, and that of its engines, goes to `log`. The caller owns the descriptors."""
        return ForkServer(*ask_for_fork_server(self._address, log))

    def _write_python(self) -> None:
        client = Path(__file__).with_name("warm_python.py")
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {client} {self._address} "$@"\n')
        self.python.chmod(0o700)

    def _close(self) -> None:
        self._lifeline.close()
        self._process.wait()
        shutil.rmtree(self._folder)


def serve(lifeline: socket.socket, listener: socket.socket, python: str) -> Callable[[], None] | None:
    """Serves until the tests are gone. → None in this process, the function to run in each forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit status is not needed
    gc.disable()
    fork_server.import_libraries(fork_server.LIBRARIES)
    importlib.import_module("djinnd.engine.engine")
    gc.freeze()
    while lifeline not in select.select([lifeline, listener], [], [])[0]:
        caller, _ = listener.accept()
        packet, fds, _, _ = socket.recv_fds(caller, warm_command.MAX_PACKET, 3)
        pid = os.fork() if packet else -1
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lifeline.close()
            listener.close()
            if packet == FORK_SERVER:
                caller.close()
                return partial(_be_fork_server, os.getppid(), *fds)
            return partial(warm_command.run, packet, fds, caller, python)
        for fd in fds:
            os.close(fd)
        if packet == FORK_SERVER:
            pidfd = os.pidfd_open(pid)
            socket.send_fds(caller, [str(pid).encode()], [pidfd])
            os.close(pidfd)
        caller.close()
    return None


def _be_fork_server(warm_forks: int, theirs: int, log: int) -> None:
    """Descriptor 3 is its end of the socket. Its engines keep our modules, too, which an engine would import anew."""
    fork_server._OURS = ()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(theirs, 3)
    sys.argv = ["fork_server", "--fd=3", f"--parent={warm_forks}"]
    fork_server.main()


def main() -> None:
    lifeline, listener, parent = map(int, sys.argv[1:4])
    tie_to(parent)
    with socket.socket(fileno=lifeline) as ours, socket.socket(fileno=listener) as callers:
        be = serve(ours, callers, sys.argv[4])
    if be is not None:
        be()


if __name__ == "__main__":
    main()
