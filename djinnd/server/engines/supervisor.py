"""Keeps one engine alive: starts the next one when an engine dies.

    starting ──Ready──► ready ──dies, silent, garbled──► lost ──delay──► starting …
        └────── the first engine refuses the device ───────────────────► failed

Only the first engine may refuse its device for good, because that is a fault of the configuration. After any other
death a next engine is started. A call that needs an engine waits for it up to limits.engine_wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from djinn_client.errors import DjinnError, EngineLost, ShuttingDown
from djinn_client.protocol import ModelInfo
from djinnd.config import Limits, Scheduling
from djinnd.messages import BudgetSet, Ready, SetBudget, SetPolicy, Shutdown
from djinnd.server.engines.blame import Suspect
from djinnd.server.engines.engine_client import EngineClient, EngineEvents
from djinnd.server.engines.engine_process import EngineDeath, EngineProcess
from djinnd.server.engines.fork_server import ForkServer
from djinnd.server.engines.previous_engine import PreviousEngine
from djinnd.server.handover.succession import Inherited

log = logging.getLogger("djinnd.server")

EngineState = Literal["starting", "ready", "lost", "failed"]

_SHORTEST, _LONGEST = 0.25, 120.0  # seconds: second delay, doubled at each death, and longest delay
_LONGEST_FOR_A_USER = 2.0  # seconds: longest delay if one user's models are to blame, which soon are loaded no more
_QUIET = 60.0  # seconds without a death after which the delays start from 0 again


class BackOff:
    """Computes the delay before the next engine is started. The caller gives the times, in seconds."""

    def __init__(self) -> None:
        self._delay = 0.0
        self._quiet_from = -math.inf  # a death after this time resets the delay

    def died(self, at: float, over_a_user: bool = False) -> float:
        """Returns the seconds until the next start: 0 at first, then doubled from death to death. `over_a_user`: the
        models of one user are to blame, see ModelOwner.engine_lost."""
        if at >= self._quiet_from:
            self._delay = 0.0
        else:
            longest = _LONGEST_FOR_A_USER if over_a_user else _LONGEST
            self._delay = min(max(2 * self._delay, _SHORTEST), longest)
        self._quiet_from = at + self._delay + _QUIET
        return self._delay


class ModelOwner(EngineEvents, Protocol):
    """The owner of the models on an engine, which the supervisor informs."""

    def engine_lost(self, suspects: Collection[Suspect]) -> bool:
        """Called before the requests under way fail. Requests from now on wait for the next engine. Returns True if
        models of one user are to blame. Such deaths are counted, and end when the user's models are no longer
        loaded."""

    def described(self, infos: Iterable[ModelInfo]) -> None:
        """Called when the engine has sent new descriptions of its models without being asked."""


@dataclass(eq=False)
class Supervisor:
    """Starts, watches and replaces engines. `command` starts an engine (see EngineProcess.start) and receives its
    budget of device memory as `--memory`. The first engine waits until `last`, the earlier daemon's engine, is gone."""

    _command: Sequence[str]
    _memory: int  # bytes, for the next engine too; 0: the engine decides
    _environ: Mapping[str, str]
    _fork_server: ForkServer
    limits: Limits
    _scheduling: Scheduling
    _owner: ModelOwner
    _last: PreviousEngine
    state: EngineState = field(init=False, default="starting")
    restarts: int = field(init=False, default=0)
    told: Ready | None = field(init=False, default=None)  # description of the latest engine
    failure: str = field(init=False, default="")  # why no engine will ever be ready
    _changes: set[asyncio.Task[BudgetSet]] = field(init=False, default_factory=set)
    _last_death: str = field(init=False, default="")  # reason of the previous engine's death
    _died_over_a_user: bool = field(init=False, default=False)  # by the previous engine: see ModelOwner.engine_lost
    _next_start: float = field(init=False, default=0.0)  # on the loop's clock; while the state is "lost"
    _process: EngineProcess | None = field(init=False, default=None)
    _settled: asyncio.Event = field(init=False, default_factory=asyncio.Event)  # ready or failed
    _task: asyncio.Task[None] | None = field(init=False, default=None)

    def set_scheduling(self, scheduling: Scheduling) -> None:
        """Sets the scheduling rules of this engine and of all later ones."""
        self._scheduling = scheduling
        if self.state == "ready":
            self._tell_scheduling()

    def _tell_scheduling(self) -> None:
        assert self._process is not None
        rules = self._scheduling
        self._process.client.send(SetPolicy(rules.targets, rules.ageing, rules.paging))

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())
        self._task.add_done_callback(_ended)

    async def stop(self, keep_pages: bool = False) -> EngineProcess | None:
        """Ends the supervision and asks the engine to end; calls that wait for it fail. `keep_pages`: the engine saves
        the pages of sessions for the next engine. Returns the engine's process, for the caller to kill."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None:
            self._process.client.send(Shutdown(keep_pages))
            self._process.client.lose(ShuttingDown("the daemon is stopping: try again when it is back"))
        return self._process

    async def gone(self) -> None:
        """After the engine was killed: returns when no engine process is left."""
        await self._last.gone()
        if self._process is not None:
            await self._process.gone()

    def hand_over(self) -> list[Inherited]:
        """After the engine was killed: the descriptors of ending engines, for the successor."""
        return self._last.hand_over() + (self._process.hand_over() if self._process is not None else [])

    async def engine(self) -> EngineClient:
        """Returns the ready engine; waits for it up to limits.engine_wait. Raises EngineLost after that, DjinnError if
        no engine will come."""
        try:
            async with asyncio.timeout(self.limits.engine_wait):
                return await self.next_engine()
        except TimeoutError:
            raise self._no_engine() from None

    async def next_engine(self) -> EngineClient:
        """Returns the ready engine, without a limit on the wait. Raises DjinnError if no engine will come."""
        while self.state not in ("ready", "failed"):
            await self._settled.wait()
        if self.state == "failed":
            raise DjinnError(f"the daemon has no engine, because {self.failure}: see its log, then restart djinnd")
        assert self._process is not None
        return self._process.client

    def _no_engine(self) -> EngineLost:
        """The error for a call that has waited for limits.engine_wait."""
        waited, why = f"{self.limits.engine_wait:g}", f" since {self._last_death}" if self._last_death else ""
        if self.state != "lost":
            return EngineLost(f"an engine has been starting for more than {waited} s{why}: try again later")
        left = max(0.0, self._next_start - asyncio.get_running_loop().time())
        return EngineLost(
            f"there has been no engine for more than {waited} s{why}: the next one is started in {left:.0f} s: try "
            "again then",
            retry_s=round(left, 3),
        )

    @property
    def is_over(self) -> bool:
        """True if the supervision has ended: there is no engine, and none will come."""
        return self._task is not None and self._task.done()

    async def set_budget(self, memory_bytes: int) -> BudgetSet:
        """Sets the budget of device memory of this engine and of all later ones. The change continues if the caller is
        cancelled. Raises the errors of `engine`, and OutOfMemory with the least budget that is possible."""
        change = asyncio.create_task(self._set_budget(await self.engine(), memory_bytes))
        self._changes.add(change)
        change.add_done_callback(self._budget_change_ended)
        return await asyncio.shield(change)

    async def settled(self) -> None:
        """Returns when the engine is ready, or none will come."""
        await self._settled.wait()

    async def _set_budget(self, engine: EngineClient, memory_bytes: int) -> BudgetSet:
        changed = await engine.call(SetBudget, memory_bytes=memory_bytes)
        assert self.told is not None
        self.told = msgspec.structs.replace(self.told, budget_bytes=changed.budget_bytes)
        self._memory = memory_bytes
        self._owner.described(changed.models)
        log.info("budget_set bytes=%d seconds=%.3f", changed.budget_bytes, changed.seconds)
        return changed

    def _budget_change_ended(self, change: asyncio.Task[BudgetSet]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # the caller may have been cancelled: marks the error as seen

    # --- one engine after another -----------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        clock, back_off = asyncio.get_running_loop().time, BackOff()
        await self._last.gone()
        while True:
            death = await self._live()
            if death.is_final and self.restarts == 0:
                break
            delay = back_off.died(clock(), self._died_over_a_user)
            self.state, self._last_death, self._next_start = "lost", death.reason, clock() + delay
            log.info("engine_restarts in_s=%g", delay)
            await asyncio.sleep(delay)
            self.restarts += 1
            self.state = "starting"
        self.failure = death.reason
        self.state = "failed"
        log.error("engine_failed reason=%s", self.failure)
        self._settled.set()

    async def _live(self) -> EngineDeath:
        """Starts an engine and returns when it is gone."""
        self._died_over_a_user = False
        try:
            command = [*self._command, "--memory", str(self._memory)]
            process = await EngineProcess.start(
                command, self._environ, self._fork_server, self.limits, self._owner, self._lost
            )
        except OSError as error:
            return EngineDeath(f"no engine could be started: {error}", is_final=False)
        self._process = process
        process.client.ready.add_done_callback(self._ready)
        log.info("engine_started pid=%d", process.pid)
        death = await process.watch(self.limits)
        log.error("engine_lost pid=%d reason=%s", process.pid, death.reason)
        process.client.lose(EngineLost(f"{death.reason}: the session is kept, try again"))
        process.kill()
        await process.gone()
        return death

    def _ready(self, ready: asyncio.Future[Ready]) -> None:
        if not ready.cancelled() and self.state == "starting":
            self.told = ready.result()
            self.state = "ready"
            log.info("engine_ready pid=%d device=%s", self.told.pid, self.told.device)
            self._tell_scheduling()
            self._settled.set()

    def _lost(self, suspects: list[Suspect]) -> None:
        self.state = "lost"
        self._settled.clear()
        self._died_over_a_user = self._owner.engine_lost(suspects)


def _ended(supervision: asyncio.Task[None]) -> None:
    if not supervision.cancelled() and (fault := supervision.exception()) is not None:
        log.critical("supervision_failed", exc_info=fault)
