"""The server's end of one user's intervention process, which runs the user's functions, one request at a time.

    starting ──its first message──► idle ──a request──► asked ──its answer──► idle
        │                             │                   │
        └── it cannot be confined     │                   └── too long, too much, garbage, a signal ──► killed
                                      └── a message without a request ────────────────────────────────────┘

However it ends, a waiting request gets the reason. Its functions are gone then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

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
from djinnd.jobs import sandbox as interventions
from djinnd.jobs.sandbox import (
    MAX_FRAME,
    CallFunctions,
    ForgetFunctions,
    FunctionEdit,
    FunctionsDone,
    FunctionsFailed,
    FunctionsReady,
    Key,
    LoadFunction,
    decode_from_process,
)
from djinnd.server.engines.confined_process import ConfinedProcess

_MOST_TOLD = 4000  # characters of an error's text


class FunctionProcess(ConfinedProcess):
    """`functions`: the functions that it has, or is about to have."""

    _event = "functions"
    _name = "the intervention process"
    _doer = "the function"
    _error = FunctionFailed
    _start = 120.0  # it imports torch
    _max_frame = MAX_FRAME
    _max_output = 4 * MAX_FRAME  # one LoadFunction, and ForgetFunctions

    def __init__(
        self, command: Sequence[str], user: int, memory: int, on_end: Callable[[FunctionProcess], None]
    ) -> None:
        super().__init__(command, user, memory, on_end)
        self.functions: set[Key] = set()
        self._turn = asyncio.Lock()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[list[AddEdit]] | None = None
        self._edits: list[AddEdit] = []
        self._room = 0  # bytes that the edits of the answer may still take

    async def ask(
        self, message: LoadFunction | CallFunctions, seconds: float, window: int | None = None, room: int = 0
    ) -> list[AddEdit]:
        """Sends a request, waits for the answer, and returns the edits that the functions make, which may take `room`
        bytes. `window` stays the caller's. A caller that is cancelled during its turn kills the process, because a
        running function cannot be stopped otherwise. Raises FunctionFailed, InvalidRequest; NotPermitted if this
        machine cannot confine the process; FunctionNotFound if it has ended meanwhile."""
        async with self._turn:
            await asyncio.shield(self._ready)
            if self._end is not None:
                raise FunctionNotFound("the intervention process has ended, and with it the function: intervene again")
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
                self._kill(FunctionNotFound("the call was cancelled, and the function was ended"))
                raise
            finally:
                self._answer.cancel()
                self._answer, self._edits = None, []

    def forget(self, functions: set[Key]) -> None:
        gone = self.functions & functions
        self.functions -= gone
        if gone and self._is_ready:
            self._connection.send(interventions.encode(ForgetFunctions(sorted(gone))))

    def kill(self) -> None:
        self._kill(FunctionNotFound("the intervention process was ended: intervene again"))

    def frame(self, payload: bytes, fds: list[int]) -> None:
        try:
            message = decode_from_process(payload)
        except ProtocolError as error:
            return self.broken(error)
        if isinstance(message, FunctionsReady) and not self._ready.done():
            return self._started(message.lacking)
        if self._answer is None or self._answer.done():
            return self._fail("the function has sent the daemon a message without a request")
        self._room -= len(payload)
        match message:
            case FunctionEdit(edit=edit) if self._room >= 0:
                self._edits.append(edit)
            case FunctionEdit():
                told = "its changes take more bytes than a session's edits may (limits.edit_bytes_per_session)"
                self._kill(QuotaExceeded(told, quota="edit_bytes_per_session"))
            case FunctionsDone():
                self._answer.set_result(self._edits)
            case FunctionsFailed(code=code, message=told):
                self._answer.set_exception(from_code(code, told[:_MOST_TOLD], {}))
            case _:
                self._fail("the function has sent the daemon garbage")

    # --- its life -----------------------------------------------------------------------------------------------------

    def _started(self, lacking: str) -> None:
        if lacking:
            told = f"the daemon runs no functions where it cannot confine them, and this machine lacks {lacking}"
            self._kill(NotPermitted(f"{told}: intervene(point, function, local=True) runs them in your process"))
        else:
            self._is_ready = True
            self._ready.set_result(None)

    def _over(self, error: DjinnError) -> None:
        for waiting in (self._ready, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # a future without a waiter: marks the error as seen
