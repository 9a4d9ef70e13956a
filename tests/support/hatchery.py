"""Nurseries for daemons, forked from a process that has imported their libraries: a daemon takes one over as it would
from a predecessor. The imports are three of the four seconds of processor time that a start takes, and tests start more
than a hundred daemons.

    this process ──its log──► hatchery ──fork──► nursery ──fork──► engine
                                                    ▲
    this process ──starts, with the nursery's socket and pidfd──► daemon
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from djinnd.engine import nursery
from djinnd.engine.lifeline import tie_to

ROOT = Path(__file__).resolve().parents[2]


class Nursery(NamedTuple):
    """That no daemon has yet. It ends when nobody has its socket."""

    pid: int
    socket: int
    pidfd: int


class Hatchery:
    """Owns the process. `environ` is what the libraries are imported with."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.hatchery", str(theirs.fileno()), str(os.getpid())],
                env=dict(environ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def nursery(self, log: int) -> Nursery:
        """What it and its engines say goes to `log`. The caller owns the descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [b"nursery"], [theirs.fileno(), log])
        packet, (pidfd,), _, _ = socket.recv_fds(self._socket, 16, 1)
        return Nursery(int(packet), ours.detach(), pidfd)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(sock: socket.socket) -> bool:
    """Until the tests are gone. True in a process that is to be a nursery: descriptor 3 is its end of the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how nurseries have ended
    gc.disable()
    nursery.import_libraries(nursery.LIBRARIES)
    gc.freeze()
    while True:
        packet, fds, _, _ = socket.recv_fds(sock, 16, 2)
        if not packet:
            return False
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            theirs, log = fds
            os.dup2(log, 1)
            os.dup2(log, 2)
            sock.close()
            os.dup2(theirs, 3)
            return True
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(sock, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def main() -> None:
    fd, parent = map(int, sys.argv[1:])
    tie_to(parent)
    hatchery = os.getpid()
    with socket.socket(fileno=fd) as sock:
        is_nursery = serve(sock)
    if is_nursery:
        sys.argv = ["nursery", "--fd=3", f"--parent={hatchery}"]
        nursery.main()


if __name__ == "__main__":
    main()
