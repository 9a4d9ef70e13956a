"""Inspections: checks checkpoints that no administrator has configured in a confined child process of their user.

    configured model    Plan, Load ──────────────────────────────────► engine
    any other           Inspect ──► child ──passed──► Plan's answer, or Load ──► engine

So a checkpoint that takes too much time or memory takes it from the child of the user that brought it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from djinn_client.errors import DjinnError, ModelRejected, ProtocolError, from_code
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import decoded, framed
from djinn_client.protocol.fields.image import Image
from djinn_client.protocol.fields.placing import ModelPlan
from djinnd.config import Limits
from djinnd.confinement.cpu import cpu_seconds
from djinnd.messages import DescribeDevice, DescribeImage, Failed, ImageDescribed, Plan, Planned
from djinnd.messages.inspections import Confined, Inspect, Passed
from djinnd.server.engines.confined_process import sparse_environ
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.engines.engine_process import Process
from djinnd.server.engines.fork_server import ForkServer
from djinnd.server.engines.metered_process import MeteredProcess
from djinnd.server.models.open_files import duplicates

PLACES = 4  # inspections at once, each of another user
_MOST_TOLD = 4000  # characters of an error's text

Answer = Planned | ImageDescribed | Passed | Failed
A = TypeVar("A", Planned, ImageDescribed, Passed)

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Confined | Answer] = msgspec.msgpack.Decoder(Confined | Answer)


@dataclass(eq=False)
class Inspector:
    """Runs inspections. `command` is a `python -m …` that inspects; empty: all checkpoints pass. `charge(user,
    seconds)` charges the user for CPU time; `expect_time(user)` raises QuotaExceeded if the user has used too much."""

    _command: Sequence[str]
    _fork_server: ForkServer
    limits: Limits
    _charge: Callable[[int, float], None]
    _expect_time: Callable[[int], None]
    _turns: dict[int, asyncio.Lock] = field(init=False, default_factory=dict)  # by user
    _places: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(PLACES))
    _processes: set[InspectionProcess] = field(init=False, default_factory=set)

    @property
    def is_there(self) -> bool:
        return bool(self._command)

    async def plan(self, user: int, engine: EngineClient, opened: ModelFiles, **fields: Any) -> ModelPlan:
        """Plans a load; `fields` are those of messages.Plan. Raises the checkpoint's fault, OutOfMemory,
        QuotaExceeded."""
        return (await self._inspect(user, engine, opened, Plan(0, **fields), Planned)).plan

    async def describe(self, user: int, engine: EngineClient, opened: ModelFiles, **fields: Any) -> Image:
        """Describes the layout of the weights; `fields` are those of messages.DescribeImage. Raises as `plan` does."""
        return (await self._inspect(user, engine, opened, DescribeImage(0, **fields), ImageDescribed)).image

    async def check(self, user: int, engine: EngineClient, opened: ModelFiles, **fields: Any) -> None:
        """Checks that an engine may build the model; `fields` are those of messages.Plan. Raises as `plan` does."""
        await self._inspect(user, engine, opened, Plan(0, **fields), Passed)

    async def close(self) -> None:
        """Kills all inspections, and returns when they are gone."""
        for process in list(self._processes):
            await process.end()

    async def _inspect(
        self, user: int, engine: EngineClient, opened: ModelFiles, job: Plan | DescribeImage, wanted: type[A]
    ) -> A:
        async with self._turns.setdefault(user, asyncio.Lock()), self._places:
            self._expect_time(user)
            described = await engine.call(DescribeDevice, model=job.model)
            process = InspectionProcess(
                self._command,
                self._fork_server,
                user,
                self.limits,
                lambda seconds: self._charge(user, seconds),
                self._processes.discard,
            )
            self._processes.add(process)
            try:
                job.files = list(opened)
                question = Inspect(job, described.figures, is_plan=wanted is Planned)
                answer = await process.ask(question, duplicates(opened))
            finally:
                process.kill()
        if isinstance(answer, Failed):
            raise from_code(answer.code, answer.message[:_MOST_TOLD], answer.data)
        if not isinstance(answer, wanted):
            raise ModelRejected(f"{job.model}: the inspection gave the wrong kind of answer")
        return answer


class InspectionProcess(MeteredProcess):
    """The child process of one inspection: one question, one answer."""

    _event = "inspection"
    _name = "the inspection"
    _doer = "the inspection"
    _error = ModelRejected
    _start = 120.0  # without the fork server it imports torch
    _max_frame = _max_output = 16 << 20  # the layout of a large model's image
    _job = "inspecting the checkpoint"
    _limit = "limits.inspection"

    def __init__(
        self,
        command: Sequence[str],
        fork_server: ForkServer,
        user: int,
        limits: Limits,
        charge: Callable[[float], None],
        on_end: Callable[[InspectionProcess], None],
    ) -> None:
        super().__init__(command, user, limits.inspection_memory, limits.inspection_seconds, charge, on_end)
        self._fork_server = fork_server
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def ask(self, question: Inspect, fds: Sequence[int]) -> Answer:
        """Sends the question and returns the answer. The descriptors belong to the connection, which closes them.
        Raises ModelRejected if the process has ended."""
        self._connection.send(framed(_encode(question), len(fds)), fds)
        return await self._answer

    def kill(self) -> None:
        self._kill(ModelRejected("the inspection is over"))

    def frame(self, payload: bytes, fds: list[int]) -> None:
        try:
            message = decoded(_decoder, payload)
        except ProtocolError as error:
            return self.broken(error)
        if isinstance(message, Confined):
            self._started(message.lacking)
            self._cpu = cpu_seconds(self._pid) or 0.0  # the user does not pay for the start
            self._begin_job()
        elif not self._answer.done():
            self._answer.set_result(message)

    @property
    def _is_busy(self) -> bool:
        return not self._answer.done()

    async def _spawn(self, command: Sequence[str], theirs: socket.socket) -> Process:
        forked = await self._fork_server.fork(command, theirs, self._start, sparse_environ())
        return forked or await super()._spawn(command, theirs)

    def _over(self, error: DjinnError) -> None:
        super()._over(error)
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # a future without a waiter: marks the error as seen
