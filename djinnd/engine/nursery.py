"""`python -m djinnd.engine.nursery`: the process that engines are forked from.

Importing torch and transformers takes seconds; all else that an engine does before it is ready takes a fraction of one.
So this process imports them once, and an engine is a fork of it. djinnd's own modules are imported by each engine: it
runs the code that is installed when it starts.

A fork is sound because this process has one thread and has never spoken to a device: a CUDA context does not survive
one. That is looked at, rather than trusted, when the libraries have been imported. See djinnd/births.py for what is
said, and djinnd/server/nursery.py for the other side.
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

from djinnd import births
from djinnd.births import MAX_PACKET, Bear, Born, Ended, FromNursery, Refused
from djinnd.engine.lifeline import tie_to
from djinnd.telemetry import configure_logging

log = logging.getLogger("djinnd.engine")

# What engines import that is not djinnd's. One family stands for what all families import.
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
# jemalloc's, which pyarrow brings: it takes its locks before a fork, and begins anew in the child.
_SAFE_THREADS = {"jemalloc_bg_thd"}
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class Newborn(NamedTuple):
    """The process that has just been forked, as it sees itself."""

    request: Bear
    fd: int  # of the engine's socket
    nursery: int  # pid

    def grow_up(self) -> None:
        """Becomes the engine. Ends with status 0, or with whatever is raised. Where the nursery was killed as it was
        born it ends at once: no server waits for one of whom it has not heard."""
        try:
            tie_to(self.nursery)
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
        sys.argv = [module, *arguments, "--fd", str(self.fd), "--parent", str(self.nursery)]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # to free what it shares with the nursery would be to copy it first


class Nursery:
    """Owns its engines as their parent: it reaps them, and says how they ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._versions = births.versions()
        self._unfit = ""  # why this process must not be forked
        self._pids: dict[int, int] = {}  # of the engines that live, by pidfd
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def serve(self, libraries: Sequence[str]) -> Newborn | None:
        """Until the server is gone, and then answers None. Answers otherwise in a process that was forked."""
        began = time.monotonic()
        gc.disable()  # until somebody has grown up
        import_libraries(libraries)
        gc.freeze()  # no engine's collector walks, and so copies, what all of them share
        self._unfit = unfit()
        log.info("nursery_warm pid=%d seconds=%.3f", os.getpid(), time.monotonic() - began)
        with suppress(ConnectionError):  # the server is gone
            while True:
                ready = {fd for fd, _ in self._poll.poll()}
                for pidfd in self._pids.keys() & ready:
                    self._reap(pidfd)
                if self._socket.fileno() in ready:
                    packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
                    if not packet:
                        break
                    newborn = self._bear(births.decode_to_nursery(packet), *fds)
                    if newborn is not None:
                        return newborn
        return None

    def _bear(self, request: Bear, fd: int) -> Newborn | None:
        """None in this process."""
        reason = self._unfit
        if request.versions != self._versions:
            reason = "it has other versions of its libraries than are installed now"
        if reason:
            os.close(fd)
            self._send(Refused(reason))
            return None
        nursery = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `unfit` has looked at them
            pid = os.fork()
        if pid == 0:
            for pidfd in self._pids:
                os.close(pidfd)
            return Newborn(request, fd, nursery)
        os.close(fd)
        os.setpgid(pid, pid)  # before the server hears of it, which kills the group
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._send(Born(pid), pidfd)
        return None

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _send(self, message: FromNursery, *fds: int) -> None:
        socket.send_fds(self._socket, [births.encode(message)], fds)


def import_libraries(names: Sequence[str]) -> None:
    """What cannot be imported is the engine's to report, if it needs it."""
    with _one_blas_thread():
        for name in names:
            before = len(_thread_names())
            with suppress(ImportError):
                importlib.import_module(name)
            for started in _thread_names()[before:]:
                log.info("nursery_thread library=%s name=%s", name, started)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Each OpenBLAS starts its threads when it is loaded: numpy's, and that of scipy, which transformers imports where
    it is there. No engine uses them; torch has its own."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    yield
    del os.environ[_BLAS_THREADS]
    if before is not None:
        os.environ[_BLAS_THREADS] = before


def _thread_names() -> list[str]:
    """The first thread's first."""
    tasks = sorted(os.listdir("/proc/self/task"), key=int)
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]


def reseed() -> None:
    """Forks would draw the same numbers. Python's own generator does this by itself; a device's is the engine's."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def unfit() -> str:
    """Why this process must not be forked; "": it may be."""
    threads = [name for name in _thread_names() if name not in _SAFE_THREADS]
    if len(threads) > 1:
        return f"importing the libraries has started {len(threads) - 1} threads: {', '.join(threads[1:])}"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            if (target := os.readlink(f"/proc/self/fd/{fd}")).startswith("/dev/nvidia"):
                return f"importing the libraries has opened {target}"
    return ""


def main(libraries: Sequence[str] = LIBRARIES) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="The nursery's end of the socket pair to the server.")
    parser.add_argument("--parent", type=int, required=True, help="The server's pid: the nursery ends when it does.")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    given = parser.parse_args()
    tie_to(given.parent)
    configure_logging(given.log_level, given.log_format)
    os.closerange(3, given.fd)  # whatever the server was started with is not for engines
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    with socket.socket(fileno=given.fd) as sock:
        newborn = Nursery(sock).serve(libraries)
    if newborn is not None:
        newborn.grow_up()


if __name__ == "__main__":
    main()
