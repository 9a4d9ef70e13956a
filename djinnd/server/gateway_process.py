"""Runs the HTTP gateway as a child of the daemon: `djinnd --http ADDRESS`.

The gateway is a client like any other, so no part of the daemon depends on it. If it ends, it is started again, after a
pause that doubles from time to time. It ends with the daemon, in whatever way the daemon ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Sequence
from contextlib import suppress

log = logging.getLogger("djinnd.server")

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_SOUND_S = 60.0  # after a life of so many seconds the pause begins at the shortest again


class GatewayProcess:
    """`command` starts the gateway; empty: there is no gateway."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._command:
            self._keeping = asyncio.create_task(self._keep())

    def reload(self) -> None:
        """Makes the gateway read its configuration again."""
        self._signal(signal.SIGHUP)

    def stop(self) -> None:
        """Makes the gateway refuse new requests, and end when its requests are answered."""
        if self._keeping is not None:
            self._keeping.cancel()
        self._signal(signal.SIGTERM)

    async def gone(self, patience_s: float) -> None:
        """Waits for the gateway's end, and kills it after `patience_s` seconds."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            self._process = await create_subprocess_exec(*self._command, stdin=DEVNULL)
            log.info("gateway_started pid=%d", self._process.pid)
            status = await self._process.wait()
            log.error("gateway_ended status=%d", status)
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _SOUND_S else min(2 * pause, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
