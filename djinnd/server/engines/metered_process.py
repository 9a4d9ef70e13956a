"""A confined process with a limit on the CPU time of each of its jobs, and an account of all the CPU time it uses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from djinn_client.errors import DjinnError
from djinnd.confinement.cpu import cpu_seconds
from djinnd.server.engines.confined_process import ConfinedProcess

log = logging.getLogger("djinnd.server")

WALL = 6  # times its CPU seconds, that a job may take by the clock: the machine may have other processes to run


class MeteredProcess(ConfinedProcess):
    """Kills a process that takes too long for a job. `seconds`: most CPU time of one job. `charge` is called with CPU
    seconds that the process has used."""

    _job: ClassVar[str]  # in errors: the work that took too long
    _limit: ClassVar[str]  # in errors: the setting's name without _seconds or _memory

    def __init__(
        self,
        command: Sequence[str],
        user: int,
        memory: int,
        seconds: float,
        charge: Callable[[float], None],
        on_end: Callable[[Any], None],
    ) -> None:
        super().__init__(command, user, memory, on_end)
        self._memory = memory
        self._seconds = seconds
        self._charge = charge
        self._began = self._cpu_began = 0.0  # of the present job
        self._cpu = 0.0  # seconds that are charged
        self._watch: asyncio.TimerHandle | None = None

    @property
    def _is_busy(self) -> bool:
        """True while it has a job."""
        raise NotImplementedError

    def _started(self, lacking: str) -> None:
        """Called with its first message. `lacking`: the part of the sandbox that this
        machine lacks; "" if none."""
        self._is_ready = True
        if lacking:
            log.warning("%s_not_confined user=%d lacking=%s", self._event, self.user, lacking)

    def _begin_job(self) -> None:
        self._began, self._cpu_began = time.monotonic(), self._cpu
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._seconds, self._check_time)

    def _check_time(self) -> None:
        """Kills the process if its present job has taken too long, else checks again when that can be the case. It may
        be a later job than when this was scheduled."""
        self._watch = None
        if not self._is_busy or self._end is not None:
            return
        self._meter()
        cpu, wall = self._cpu - self._cpu_began, time.monotonic() - self._began
        if cpu >= self._seconds or wall >= self._seconds * WALL:
            told = f"{self._job} took {cpu:.1f} s of CPU time, {wall:.1f} s by the clock: at most {self._seconds:g} s"
            self._kill(self._error(f"{told} ({self._limit}_seconds), and {WALL} times that by the clock"))
            return
        rest = min(self._seconds - cpu, self._seconds * WALL - wall)
        self._watch = asyncio.get_running_loop().call_later(max(rest, 0.05), self._check_time)

    def _meter(self) -> None:
        """Charges the CPU time that the process has used since the last charge."""
        cpu = cpu_seconds(self._pid)
        if cpu is not None:
            self._charge(max(0.0, cpu - self._cpu))
            self._cpu = cpu

    def _over(self, error: DjinnError) -> None:
        if self._is_ready:
            self._meter()
        if self._watch is not None:
            self._watch.cancel()

    def _account(self, status: int) -> str:
        told = super()._account(status)
        if self._is_ready and status < 0:
            told += f". It may take {self._memory:,} bytes ({self._limit}_memory)"
        return told
