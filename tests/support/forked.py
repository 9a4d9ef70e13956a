"""Daemons with scripted engines, forked from a process that has imported their modules. Imports take most of a start,
and tests start hundreds of them.

    this process ──request, its log, a socket──► parent ──fork──► daemon
                 ◄───────its pid, its exit status──┘

The parent is `python -X dev -m tests.support.forked FD`. A daemon that replaces itself executes the command that would
have started it. See served.py for the daemon.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_DAEMON = "tests.support.served"
_MAX_PACKET = 1 << 17
_STATUS = 16  # most bytes of an exit status


class Forked:
    """A daemon, with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: int) -> None:
        self.returncode: int | None = None
        self._tells, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(arguments), dict(environ)]).encode()
            socket.send_fds(_parent(), [request], [log, theirs.fileno()])
        self.pid = int(self._tells.recv(_STATUS))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._tells.settimeout(timeout)
            try:
                self.returncode = int(self._tells.recv(_STATUS))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(_DAEMON, timeout or 0) from None
            self._tells.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent() -> socket.socket:
    """Starts the parent, which ends when this socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-X", "dev", "-m", "tests.support.forked", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()])
    atexit.register(_end, ours, process)
    return ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


class _Parent:
    """Reaps the daemons and reports their exit status."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._living: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the pid, and the socket of its starter
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> Callable[[], None] | None:
        """Serves until the tests are gone. → None in this process, the function to run in each forked process."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            for pidfd in self._living.keys() & ready:
                self._reap(pidfd)
            if self._requests.fileno() in ready:
                packet, fds, _, _ = socket.recv_fds(self._requests, _MAX_PACKET, 2)
                if not packet:
                    return None
                pid = os.fork()
                if pid == 0:
                    os.dup2(fds[0], 1)
                    os.dup2(fds[0], 2)
                    self._forget()
                    for fd in fds:
                        os.close(fd)
                    return partial(_be_daemon, *json.loads(packet))
                os.close(fds[0])
                self._watch(pid, socket.socket(fileno=fds[1]))

    def _watch(self, pid: int, caller: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self._living[pidfd] = pid, caller
        self._poll.register(pidfd, select.POLLIN)
        caller.send(str(pid).encode())

    def _reap(self, pidfd: int) -> None:
        pid, caller = self._living.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with caller, suppress(BrokenPipeError):  # the starter may be gone
            caller.send(str(status).encode())

    def _forget(self) -> None:
        """In a child: drops inherited descriptors."""
        for pidfd, (_, caller) in self._living.items():
            os.close(pidfd)
            caller.close()


def _be_daemon(arguments: list[str], environ: dict[str, str]) -> None:
    from tests.support import served

    os.environ.clear()
    os.environ.update(environ)
    sys.orig_argv = [sys.executable, "-X", "dev", "-m", _DAEMON, *arguments]
    served.main(*map(Path, arguments))


def main() -> None:
    import tests.support.served  # noqa: F401  # what is shared

    gc.freeze()  # a daemon's collector would walk, and so copy, the shared objects
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        be = _Parent(requests).serve()
    if be is not None:
        be()


if __name__ == "__main__":
    main()
