"""The server's side of one confined child process, from its start to its end. See djinnd/confinement.

    starting ──its first message──► ready ──► asked, again and again
        └── too late ──► killed       └── garbage, a signal, its own end ──► ended

However it ends, `_over` is called once, with the error for the requests that wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from djinn_client.errors import DjinnError, ProtocolError
from djinnd.server.engines.engine_process import Process, execute
from djinnd.server.wire.connection import FrameConnection

log = logging.getLogger("djinnd.server")

_HUNG_UP = 1.0  # seconds that a process gets to end after it has closed its connection
# The variables that the child gets of the daemon's environment. A tenant can read all of the child's environment.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ConfinedProcess:
    """Starts, watches and kills a confined process. `command` is a `python -m …`. Appended are its user, its memory
    limit, this process's pid and the number of its socket. `on_end` is called when the process accepts no more
    requests. `gone` is done when it has ended."""

    _event: ClassVar[str]  # in log events
    _name: ClassVar[str]  # in errors: the process
    _doer: ClassVar[str]  # in errors: the program that is to blame for its end
    _error: ClassVar[type[DjinnError]]
    _start: ClassVar[float]  # seconds from its start to its first message
    _max_frame: ClassVar[int]  # bytes of a message that it sends
    _max_output: ClassVar[int]  # bytes that may wait to be sent to it

    def __init__(self, command: Sequence[str], user: int, memory: int, on_end: Callable[[Any], None]) -> None:
        self.user = user
        self._on_end = on_end
        self._end: DjinnError | None = None  # why it accepts no more requests
        self._is_ready = False
        self._pid = 0
        self._hung_up: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        self._connection = FrameConnection(ours, self, self._max_frame, self._max_output)
        command = [*command, "--user", str(user), "--memory", str(memory)]
        self.gone = asyncio.create_task(self._live(command, theirs))

    async def end(self) -> None:
        """Kills the process, and returns when it is gone."""
        self.kill()
        await asyncio.wait([self.gone])

    def kill(self) -> None:
        raise NotImplementedError

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def frame(self, payload: bytes, fds: list[int]) -> None:
        raise NotImplementedError

    def _over(self, error: DjinnError) -> None:
        """Called once, when it accepts no more requests, with the error for the waiting ones."""
        raise NotImplementedError

    def _kill(self, error: DjinnError) -> None:
        self._end_with(error)
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _fail(self, reason: str) -> None:
        self._kill(self._error(f"{reason}; its process was ended"))

    async def _spawn(self, command: Sequence[str], theirs: socket.socket) -> Process:
        """Starts the process. Raises OSError."""
        return await execute(command, sparse_environ(), theirs.fileno())

    # --- events of the connection -------------------------------------------------------------------------------------

    def broken(self, error: ProtocolError) -> None:
        self._fail(f"{self._doer} has sent the daemon garbage: {error.message}")

    def congested(self, is_congested: bool) -> None:
        pass

    def closed(self) -> None:
        """Waits for the exit status, which says more, before it reports the closed connection."""
        told = f"{self._doer} has closed its connection to the daemon"
        self._hung_up = asyncio.get_running_loop().call_later(_HUNG_UP, self._fail, told)

    # --- its life -----------------------------------------------------------------------------------------------------

    async def _live(self, command: Sequence[str], theirs: socket.socket) -> None:
        try:
            with theirs:
                process = await self._spawn(command, theirs)
        except OSError as error:
            self._end_with(self._error(f"{self._name} could not be started: {error}"))
            return self._connection.close()
        self._pid = process.pid
        log.info("%s_started user=%d pid=%d", self._event, self.user, process.pid)
        late = asyncio.get_running_loop().call_later(self._start, self._too_late)
        if self._end is not None:  # it was killed before it was started
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
            self._on_end(self)
            self._over(error)

    def _account(self, status: int) -> str:
        """The error's text for a process that has ended by itself."""
        if not self._is_ready:
            return f"{self._name} has ended before it was ready: see the daemon's log"
        if status >= 0:
            return f"{self._doer} has ended its process, with status {status}"
        if -status == signal.SIGSYS:
            return (
                f"{self._doer} was ended by the kernel for a system call that {self._doer[4:]}s may not make: they "
                "cannot start processes or threads, open sockets, or reach into other processes"
            )
        if -status == signal.SIGKILL:
            return f"{self._doer} was killed, which the kernel does when the machine is out of memory"
        return f"{self._doer}'s process died by {signal.Signals(-status).name}"


def sparse_environ() -> dict[str, str]:
    """The variables of the daemon's environment that Python and the libraries need in a confined process."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} | _ONE_THREAD
