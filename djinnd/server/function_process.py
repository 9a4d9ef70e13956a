"""One tenant's intervention process, as the server sees it: started, asked one thing at a time, ended.

    starting ──Ready──► idle ──Load, Run──► asked ──Done, Failed──► idle
        │                 │                   │
        └── Unfit         │                   └── too long, too much, nonsense, a signal ──► killed
                          └── a word that nobody asked for ──────────────────────────────────┘

Whatever ends it, who waits for it is told why; the functions that it had are gone then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from djinn_client.errors import (
    DjinnError,
    FunctionFailed,
    FunctionNotFound,
    NotPermitted,
    ProtocolError,
    QuotaExceeded,
    from_code,
)
from djinn_client.protocol import AddEdit
from djinnd import interventions
from djinnd.interventions import (
    MAX_FRAME,
    Changed,
    Done,
    Failed,
    Forget,
    Key,
    Load,
    Ready,
    Run,
    Unfit,
    decode_from_process,
)
from djinnd.server.connection import Connection

log = logging.getLogger("djinnd.server")

_OUTPUT = 4 * MAX_FRAME  # bytes that wait for the process: one Load at most, and what is to be forgotten
_MOST_TOLD = 4000  # characters
_WORD = 1.0  # seconds from the end of its connection to its own
_NOT_STARTED = "the intervention process has ended before it was ready: the daemon's log has its account"
_START = 120.0  # seconds from its start to Ready: it imports torch


class FunctionProcess:
    """`command` is a `python -m`; appended are whose it is, what it may take, this process's pid, the number of its
    socket. `functions`: those that it has, or is about to have. `on_end` is called when it takes no more; `gone` is
    done when nothing is left of it."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        user: int,
        memory: int,
        on_end: Callable[[FunctionProcess], None],
    ) -> None:
        self.user = user
        self.functions: set[Key] = set()
        self._on_end = on_end
        self._turn = asyncio.Lock()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[list[AddEdit]] | None = None
        self._edits: list[AddEdit] = []
        self._room = 0  # bytes that the answer may still have
        self._end: DjinnError | None = None  # why it takes no more
        self._pid = 0
        self._connection: Connection | None = None
        self._hung_up: asyncio.TimerHandle | None = None
        whose = ("--user", str(user), "--memory", str(memory), "--parent", str(os.getpid()))
        self.gone = asyncio.create_task(self._live([*command, *whose], environ))

    async def load(self, function: Key, point: str, code: bytes, seconds: float) -> None:
        """Raises FunctionFailed, InvalidRequest, NotPermitted where this machine cannot confine it."""
        await self._ask(Load(function, point, code), None, seconds, 0)

    async def run(self, run: Run, window: int, seconds: float, room: int) -> list[AddEdit]:
        """The edits that the functions, which it has, want. `window` stays the caller's; `room`: bytes that they may
        take. Raises FunctionFailed, InvalidRequest; FunctionNotFound where it has ended meanwhile."""
        return await self._ask(run, window, seconds, room)

    def forget(self, functions: set[Key]) -> None:
        gone = self.functions & functions
        self.functions -= gone
        if gone and self._connection is not None and self._ready.done():
            self._connection.send(interventions.encode(Forget(sorted(gone))))

    def kill(self) -> None:
        self._kill(FunctionNotFound("the intervention process was ended: intervene again"))

    async def end(self) -> None:
        """Returns when it is gone."""
        self.kill()
        await asyncio.wait([self.gone])

    # --- one exchange -----------------------------------------------------------------------------------------------

    async def _ask(self, message: Load | Run, window: int | None, seconds: float, room: int) -> list[AddEdit]:
        """Who stops waiting ends the process, unless it is another's turn: nobody can tell it to stop."""
        async with self._turn:
            await asyncio.shield(self._ready)
            if self._end is not None:
                raise FunctionNotFound("the intervention process has ended, and with it the function: intervene again")
            assert self._connection is not None
            fds = [] if window is None else [os.dup(window)]
            self._edits, self._room = [], room
            self._answer = asyncio.get_running_loop().create_future()
            self._connection.send(interventions.encode(message, len(fds)), fds)
            try:
                async with asyncio.timeout(seconds):
                    return await asyncio.shield(self._answer)
            except TimeoutError:
                error = FunctionFailed(
                    f"the function ran for longer than {seconds:g} s (functions.seconds), and was ended"
                )
                self._kill(error)
                raise error from None
            except asyncio.CancelledError:
                self._kill(FunctionNotFound("the call was given up, and the function was ended"))
                raise
            finally:
                self._answer.cancel()
                self._answer, self._edits = None, []

    def frame(self, payload: bytes, fds: list[int]) -> None:
        try:
            message = decode_from_process(payload)
        except ProtocolError as error:
            return self.broken(error)
        if isinstance(message, Ready | Unfit) and not self._ready.done():
            return self._started(message)
        if self._answer is None or self._answer.done():
            return self._fail("the function has spoken to the daemon when nobody had asked")
        self._room -= len(payload)
        match message:
            case Changed(edit=edit) if self._room >= 0:
                self._edits.append(edit)
            case Changed():
                told = "what it has changed takes more bytes than a session's edits may (limits.edit_bytes_per_session)"
                self._kill(QuotaExceeded(told, quota="edit_bytes_per_session"))
            case Done():
                self._answer.set_result(self._edits)
            case Failed(code=code, message=told):
                self._answer.set_exception(from_code(code, told[:_MOST_TOLD], {}))
            case _:
                self._fail("the function has said to the daemon what means nothing")

    def broken(self, error: ProtocolError) -> None:
        self._fail(f"the function has said to the daemon what means nothing: {error.message}")

    def congested(self, is_congested: bool) -> None:
        pass

    def closed(self) -> None:
        """The status that it is about to end with says more."""
        told = "the function has closed its connection to the daemon"
        self._hung_up = asyncio.get_running_loop().call_later(_WORD, self._fail, told)

    # --- its life ---------------------------------------------------------------------------------------------------

    def _started(self, message: Ready | Unfit) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(None)
        else:
            self._kill(
                NotPermitted(
                    f"the daemon runs no functions where it cannot confine them, and this machine lacks "
                    f"{message.lacking}: intervene(point, function, local=True) runs them in your process"
                )
            )

    async def _live(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--fd", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environ,
                    start_new_session=True,  # a terminal's Ctrl-C is for the server
                )
        except OSError as error:
            ours.close()
            return self._over(FunctionFailed(f"no intervention process could be started: {error}"))
        self._pid = process.pid
        log.info("functions_started user=%d pid=%d", self.user, process.pid)
        self._connection = Connection(ours, self, MAX_FRAME, _OUTPUT)
        late = asyncio.get_running_loop().call_later(_START, self._too_late)
        if self._end is not None:  # it was ended before it was there
            self._signal()
        status = await process.wait()
        self._pid = 0
        late.cancel()
        if self._hung_up is not None:
            self._hung_up.cancel()
        self._over(FunctionFailed(_account(status) if self._ready.done() else _NOT_STARTED))
        log.info("functions_ended user=%d pid=%d status=%d reason=%s", self.user, process.pid, status, self._end)
        self._connection.close()

    def _too_late(self) -> None:
        if not self._ready.done():
            self._fail(f"the intervention process was not ready within {_START:g} s")

    def _fail(self, reason: str) -> None:
        self._kill(FunctionFailed(f"{reason}; its process was ended"))

    def _kill(self, error: DjinnError) -> None:
        self._over(error)
        self._signal()

    def _signal(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _over(self, error: DjinnError) -> None:
        """It takes no more. Who is waiting is told the error."""
        if self._end is not None:
            return
        self._end = error
        for waiting in (self._ready, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting: that is no fault
        self._on_end(self)


def _account(status: int) -> str:
    """Of a process that has ended by itself."""
    if status >= 0:
        return f"the function has ended its process, with status {status}"
    if -status == signal.SIGSYS:
        return (
            "the function was ended by the kernel, of which it had asked what functions may not do: start processes or "
            "threads, open sockets, reach into other processes"
        )
    if -status == signal.SIGKILL:
        return "the function was killed, as the kernel does where the machine's memory ends"
    return f"the function's process died by {signal.Signals(-status).name}"
