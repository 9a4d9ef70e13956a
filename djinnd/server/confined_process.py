"""One confined child process as the server sees it: started, ready, ended. See djinnd/confinement.

    starting ──its first word──► ready ──► asked, again and again
        └── too late ──► killed       └── nonsense, a signal, its own end ──► ended

Whatever ends it, `_over` is called once, with the error for those that wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from djinn_client.errors import DjinnError, ProtocolError
from djinnd.server.connection import Connection
from djinnd.server.engine_process import Process

log = logging.getLogger("djinnd.server")

_HUNG_UP = 1.0  # seconds from the end of its connection to its own
# Of the daemon's environment. A tenant can read all of what its process has.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ConfinedProcess:
    """`command` is a `python -m`; appended are its user, the memory that it may take, this process's pid and the number
    of its socket. `gone` is done when nothing is left of it."""

    _event: ClassVar[str]  # in the log
    _name: ClassVar[str]  # in errors
    _doer: ClassVar[str]  # in errors: who is to blame for its end
    _error: ClassVar[type[DjinnError]]
    _start: ClassVar[float]  # seconds from its start to its first word

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        user: int,
        memory: int,
        max_frame: int,
        max_output: int,
    ) -> None:
        self.user = user
        self._end: DjinnError | None = None  # why it takes no more
        self._is_ready = False
        self._pid = 0
        self._hung_up: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours, self, max_frame, max_output)
        whose = ("--user", str(user), "--memory", str(memory))
        self.gone = asyncio.create_task(self._live([*command, *whose], environ, theirs))

    async def end(self) -> None:
        """Returns when it is gone."""
        self.kill()
        await asyncio.wait([self.gone])

    def kill(self) -> None:
        raise NotImplementedError

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def frame(self, payload: bytes, fds: list[int]) -> None:
        raise NotImplementedError

    def _over(self, error: DjinnError) -> None:
        """It takes no more. Called once."""
        raise NotImplementedError

    def _kill(self, error: DjinnError) -> None:
        self._end_with(error)
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _fail(self, reason: str) -> None:
        self._kill(self._error(f"{reason}; its process was ended"))

    async def _spawn(self, command: Sequence[str], environ: Mapping[str, str], theirs: socket.socket) -> Process:
        """Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *command,
            *("--parent", str(os.getpid()), "--fd", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # a terminal's Ctrl-C is for the server
        )

    # --- events of the connection -----------------------------------------------------------------------------------

    def broken(self, error: ProtocolError) -> None:
        self._fail(f"{self._doer} has said to the daemon what means nothing: {error.message}")

    def congested(self, is_congested: bool) -> None:
        pass

    def closed(self) -> None:
        """The status that it is about to end with says more."""
        told = f"{self._doer} has closed its connection to the daemon"
        self._hung_up = asyncio.get_running_loop().call_later(_HUNG_UP, self._fail, told)

    # --- its life ---------------------------------------------------------------------------------------------------

    async def _live(self, command: Sequence[str], environ: Mapping[str, str], theirs: socket.socket) -> None:
        try:
            with theirs:
                process = await self._spawn(command, environ, theirs)
        except OSError as error:
            self._end_with(self._error(f"{self._name} could not be started: {error}"))
            return self._connection.close()
        self._pid = process.pid
        log.info("%s_started user=%d pid=%d", self._event, self.user, process.pid)
        late = asyncio.get_running_loop().call_later(self._start, self._too_late)
        if self._end is not None:  # it was ended before it was there
            self._kill(self._end)
        status = await process.wait()
        self._pid = 0
        late.cancel()
        if self._hung_up is not None:
            self._hung_up.cancel()
        self._end_with(self._error(self._account(status)))
        log.info("%s_ended user=%d pid=%d status=%d reason=%s", self._event, self.user, process.pid, status, self._end)
        self._connection.close()

    def _too_late(self) -> None:
        if not self._is_ready:
            self._fail(f"{self._name} was not ready within {self._start:g} s")

    def _end_with(self, error: DjinnError) -> None:
        if self._end is None:
            self._end = error
            self._over(error)

    def _account(self, status: int) -> str:
        """Of a process that has ended by itself."""
        if not self._is_ready:
            return f"{self._name} has ended before it was ready: the daemon's log has its account"
        if status >= 0:
            return f"{self._doer} has ended its process, with status {status}"
        if -status == signal.SIGSYS:
            return (
                f"{self._doer} was ended by the kernel, of which it had asked what {self._doer[4:]}s may not do: start "
                "processes or threads, open sockets, reach into other processes"
            )
        if -status == signal.SIGKILL:
            return f"{self._doer} was killed, as the kernel does where the machine's memory ends"
        return f"{self._doer}'s process died by {signal.Signals(-status).name}"


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process, by the kernel's clock for it: clock_getcpuclockid(3), which Python has not. None where it
    has ended, or `pid` is 0."""
    try:
        return time.clock_gettime((~pid << 3) | 2) if pid else None
    except OSError:
        return None


def sparse_environ() -> dict[str, str]:
    """For a confined process: what Python and the libraries need of the daemon's."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} | _ONE_THREAD
