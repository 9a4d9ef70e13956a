"""Daemons forked from a process that has imported their modules. Imports take most of a start, and tests start hundreds
of daemons.

    this process ──request, its log, a socket──► parent ──fork──► daemon
                 ◄───────its pid, its exit status──┘

The parent is `python -m tests.support.forked FD MODULE`; each module has a parent of its own. The daemon is what
`python -m MODULE ARGUMENT …` would be, in a session of its own. A daemon that replaces itself executes that command.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from djinnd.lifeline import tie_to
from tests.support.warm_python import give_fork_server

_ROOT = Path(__file__).parents[2]
SERVED = "tests.support.served"  # with a scripted engine; its Python is in development mode
REAL = "djinnd"
_IMPORTED = {SERVED: SERVED, REAL: "djinnd.server.server"}  # by the parent
_PYTHON = {SERVED: [sys.executable, "-X", "dev"], REAL: [sys.executable]}
_MAX_PACKET = 1 << 17
_STATUS = 16  # most bytes of an exit status


class Forked:
    """A daemon, with the methods of subprocess.Popen that tests use. `fork_server`: the descriptors of one, which the
    daemon takes over as from a predecessor."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: int,
        fork_server: Sequence[int] = (),
    ) -> None:
        self._module = module
        self.returncode: int | None = None
        self._tells, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(arguments), dict(environ)]).encode()
            socket.send_fds(_parent(module), [request], [log, theirs.fileno(), *fork_server])
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
                raise subprocess.TimeoutExpired(self._module, timeout or 0) from None
            self._tells.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent(module: str) -> socket.socket:
    """Starts the parent, which ends when this socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [*_PYTHON[module], "-m", "tests.support.forked", str(theirs.fileno()), module]
        process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    atexit.register(_end, ours, process)
    return ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


class _Parent:
    """Reaps the daemons and reports their exit status."""

    def __init__(self, requests: socket.socket, module: str) -> None:
        self._requests = requests
        self._module = module
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
                packet, fds, _, _ = socket.recv_fds(self._requests, _MAX_PACKET, 4)
                if not packet:
                    return None
                log, caller, *fork_server = fds
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    self._forget()
                    for fd in (log, caller):
                        os.close(fd)
                    return partial(_be_daemon, parent, self._module, fork_server, *json.loads(packet))
                for fd in (log, *fork_server):
                    os.close(fd)
                self._watch(pid, socket.socket(fileno=caller))

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


def _be_daemon(parent: int, module: str, fork_server: list[int], arguments: list[str], environ: dict[str, str]) -> None:
    os.setsid()
    tie_to(parent, signal.SIGTERM)
    os.environ.clear()
    os.environ.update(environ)
    if fork_server:
        give_fork_server(fork_server)
    sys.orig_argv = [*_PYTHON[module], "-m", module, *arguments]
    sys.argv = [module, *arguments]
    sys.modules.pop(module if module == SERVED else "djinnd.__main__", None)  # it runs as __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    number, module = sys.argv[1:]
    importlib.import_module(_IMPORTED[module])
    gc.freeze()  # a daemon's collector would walk, and so copy, the shared objects
    with socket.socket(fileno=int(number)) as requests:
        be = _Parent(requests, module).serve()
    if be is not None:
        be()


if __name__ == "__main__":
    main()
