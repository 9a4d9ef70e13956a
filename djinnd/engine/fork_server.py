"""`python -m djinnd.engine.fork_server`: forks engines.

Importing torch and transformers takes seconds; the rest of an engine's start takes a fraction of a second. So this
process imports them once, and an engine is a fork of it. Each engine imports djinnd's own modules, so it runs the code
that is installed when it starts.

Forking is safe because this process has one thread and has never opened a GPU: a CUDA context does not survive a fork.
`unfit` checks both after the imports. djinnd/jobs/fork_server.py has the messages, djinnd/server/engines/fork_server.py
the other side.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import runpy
import select
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from djinnd.jobs import fork_server as messages
from djinnd.jobs.fork_server import MAX_PACKET, ForkProcess, ForkRefused, FromForkServer, ProcessEnded, ProcessForked
from djinnd.lifeline import tie_to
from djinnd.telemetry import configure_logging

log = logging.getLogger("djinnd.engine")

# The libraries that engines import. One family stands for the imports that all families share.
LIBRARIES = (
    "numpy",
    "torch",
    "triton",
    "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
    "transformers.models.falcon.modeling_falcon",
    "transformers.models.gptj.modeling_gptj",
    "safetensors.torch",
    "posix_ipc",
    "click",
)
_OURS = ("djinnd", "djinn_client")
# The thread of jemalloc, which pyarrow brings. jemalloc takes its locks before a fork and restarts in the child.
_SAFE_THREADS = {"jemalloc_bg_thd"}
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class ForkedChild(NamedTuple):
    """The forked process, before it becomes an engine."""

    request: ForkProcess
    fd: int  # of the engine's socket
    parent: int  # pid of the fork server

    def run(self) -> None:
        """Becomes the engine. Exits with status 0, or raises the engine's exception. If the fork server was killed
        right after the fork, it exits at once: the server does not know about it."""
        try:
            tie_to(self.parent)
        except SystemExit as gone:
            print(gone, file=sys.stderr, flush=True)
            os._exit(1)
        gc.enable()
        os.environ.clear()
        os.environ.update(self.request.environ)
        reseed()
        for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
            del sys.modules[name]
        module, *arguments = self.request.arguments
        sys.argv = [module, *arguments, "--fd", str(self.fd), "--parent", str(self.parent)]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # freeing memory that is shared with the fork server would copy it first


class ForkLoop:
    """The loop of the fork server: forks engines, reaps them, and reports their exit status."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._versions = messages.versions()
        self._unfit = ""  # reason why this process must not be forked
        self._pids: dict[int, int] = {}  # running engines, by pidfd
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def serve(self, libraries: Sequence[str]) -> ForkedChild | None:
        """Serves until the server is gone. → None in the fork server, a ForkedChild in each forked process."""
        began = time.monotonic()
        gc.disable()  # until after the fork: see ForkedChild.run
        import_libraries(libraries)
        gc.freeze()  # an engine's collector would walk, and so copy, the shared objects
        self._unfit = unfit()
        log.info("fork_server_warm pid=%d seconds=%.3f", os.getpid(), time.monotonic() - began)
        with suppress(ConnectionError):  # the server is gone
            while True:
                ready = {fd for fd, _ in self._poll.poll()}
                for pidfd in self._pids.keys() & ready:
                    self._reap(pidfd)
                if self._socket.fileno() in ready:
                    packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
                    if not packet:
                        break
                    child = self._fork(messages.decode_to_fork_server(packet), *fds)
                    if child is not None:
                        return child
        return None

    def _fork(self, request: ForkProcess, fd: int) -> ForkedChild | None:
        """→ None in the fork server."""
        reason = self._unfit
        if request.versions != self._versions:
            reason = "its libraries have other versions than the installed ones"
        if reason:
            os.close(fd)
            self._send(ForkRefused(reason))
            return None
        fork_server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which `unfit` has checked
            pid = os.fork()
        if pid == 0:
            for pidfd in self._pids:
                os.close(pidfd)
            return ForkedChild(request, fd, fork_server)
        os.close(fd)
        os.setpgid(pid, pid)  # before the server knows the pid, because it kills the group
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._send(ProcessForked(pid), pidfd)
        return None

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(ProcessEnded(pid, os.waitstatus_to_exitcode(status)))

    def _send(self, message: FromForkServer, *fds: int) -> None:
        socket.send_fds(self._socket, [messages.encode(message)], fds)


def import_libraries(names: Sequence[str]) -> None:
    """A library that cannot be imported is skipped: an engine that needs it reports the error."""
    with _one_blas_thread():
        for name in names:
            before = len(_thread_names())
            with suppress(ImportError):
                importlib.import_module(name)
            for started in _thread_names()[before:]:
                log.info("fork_server_thread library=%s name=%s", name, started)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """numpy and scipy (which transformers imports if it is installed) each load an OpenBLAS that starts threads at
    once. Engines do not use them; torch has its own BLAS."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    yield
    del os.environ[_BLAS_THREADS]
    if before is not None:
        os.environ[_BLAS_THREADS] = before


def _thread_names() -> list[str]:
    """The process's threads; the main thread comes first."""
    tasks = sorted(os.listdir("/proc/self/task"), key=int)
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]


def reseed() -> None:
    """Gives the fork random numbers of its own. Python's generator is reseeded by Python itself, and a device's
    generator belongs to the engine."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def unfit() -> str:
    """The reason why this process must not be forked, or ""."""
    threads = [name for name in _thread_names() if name not in _SAFE_THREADS]
    if len(threads) > 1:
        return f"importing the libraries has started {len(threads) - 1} threads: {', '.join(threads[1:])}"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            if (target := os.readlink(f"/proc/self/fd/{fd}")).startswith("/dev/nvidia"):
                return f"importing the libraries has opened {target}"
    return ""


def main(libraries: Sequence[str] = LIBRARIES) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="The fork server's end of the socket pair to the server.")
    parser.add_argument("--parent", type=int, required=True, help="Pid of the server, with which this process exits.")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    given = parser.parse_args()
    tie_to(given.parent)
    configure_logging(given.log_level, given.log_format)
    os.closerange(3, given.fd)  # engines must not inherit the server's other descriptors
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    with socket.socket(fileno=given.fd) as sock:
        child = ForkLoop(sock).serve(libraries)
    if child is not None:
        child.run()


if __name__ == "__main__":
    main()
