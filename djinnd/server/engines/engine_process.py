"""One engine process, from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from djinnd.config import Limits
from djinnd.server.engines.blame import Suspect
from djinnd.server.engines.engine_client import EngineClient, EngineEvents
from djinnd.server.engines.fork_server import ForkedProcess, ForkServer
from djinnd.server.engines.previous_engine import ENGINE_FD
from djinnd.server.handover.pidfds import open_pidfd
from djinnd.server.handover.succession import Inherited

DEVICE_REFUSED = 3  # exit status of an engine that would fail again in the same way
STOPPING = 5.0  # seconds that an engine gets to end by itself
_REFUSAL_S = 20.0  # seconds, at most, from a refused device to the exit status
_TICK = 1.0  # seconds: the longest interval between two checks for silence


class EngineDeath(NamedTuple):
    """Why an engine process has ended."""

    reason: str
    is_final: bool  # the next engine would end in the same way


Process = asyncio.subprocess.Process | ForkedProcess  # each leads a process group


class EngineProcess:
    """Owns an engine's process and the client to it."""

    def __init__(self, process: Process, client: EngineClient) -> None:
        self.client = client
        self.pid = process.pid
        self._process = process
        self._exited = asyncio.create_task(process.wait())
        self._pidfd: int | None = None  # None: the kernel has no pidfds, or the process has already ended
        with suppress(OSError):
            self._pidfd = open_pidfd(process.pid)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        fork_server: ForkServer,
        limits: Limits,
        listener: EngineEvents,
        on_lost: Callable[[list[Suspect]], None],
    ) -> EngineProcess:
        """Starts an engine. `command` is a `python -m …`. Appended are `--fd`, its socket's number, and `--parent`, the
        pid of its parent: the fork server's, or without one this process's. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                forked = await fork_server.fork(command, theirs, limits.engine_start)
                process = forked or await execute(command, environ, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return cls(process, EngineClient(ours, listener, on_lost))

    async def watch(self, limits: Limits) -> EngineDeath:
        """Returns when the process has ended or must be killed.

        Silence is counted in checks and not by the clock: if this process itself was stopped or late, the engine is not
        to blame.
        """
        heard, silent = 0, 0.0
        tick = min(_TICK, limits.engine_silence / 4)
        ends: list[asyncio.Future[Any]] = [self._exited, self.client.lost]
        while True:
            await asyncio.wait(ends, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            if any(end.done() for end in ends):
                return await self._death()
            silent = silent + tick if heard == self.client.heard else 0.0
            heard = self.client.heard
            if silent >= (limits.engine_silence if heard else limits.engine_start):
                return EngineDeath(f"the engine gave no sign of life for {silent:g} s", is_final=False)

    async def _death(self) -> EngineDeath:
        """Finds the reason for an engine's end. The exit status is more precise than the closed stream, and comes a
        moment later. An engine that has refused its device takes longer, because it unloads its libraries."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK if self.client.heard else _REFUSAL_S):
                status = await asyncio.shield(self._exited)
                if status < 0:
                    return EngineDeath(f"the engine was killed by {signal.Signals(-status).name}", is_final=False)
                is_final = status == DEVICE_REFUSED and self.client.heard == 0
                return EngineDeath(f"the engine ended with status {status}", is_final)
        return EngineDeath("the engine closed its connection", is_final=False)

    async def exited(self) -> None:
        await asyncio.wait([self._exited])

    async def finished(self) -> None:
        """Returns when the engine has sent its last message and may be killed."""
        ends: list[asyncio.Future[Any]] = [self._exited, self.client.over]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with the processes that it has started

    async def gone(self) -> None:
        """After `kill`: returns when the process is gone. Cancelling one caller does not disturb other callers."""
        await asyncio.wait([self._exited])
        self.client.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    @property
    def can_be_left(self) -> bool:
        """True if a successor can wait for the process's end."""
        return self._pidfd is not None

    def hand_over(self) -> list[Inherited]:
        """After `kill`: the pidfd of a process that has not ended yet, for the successor."""
        return [] if self._pidfd is None else [Inherited(ENGINE_FD, self._pidfd)]


async def execute(command: Sequence[str], environ: Mapping[str, str], fd: int) -> Process:
    """Starts a process and tells it `fd`, its end of a socket pair, and its parent's pid. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        *("--fd", str(fd), "--parent", str(os.getpid())),
        pass_fds=[fd],
        stdin=asyncio.subprocess.DEVNULL,
        env=dict(environ),
        start_new_session=True,  # a terminal's Ctrl-C goes to the server alone, which then ends it
    )
