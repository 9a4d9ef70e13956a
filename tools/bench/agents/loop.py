"""Agents live the lives that a plan has drawn, in one process and one event loop, with any server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tools.bench.agents.plan import Agent, Wait, Work, drawn

ASKING = 16  # agents that ask their question at the same time, where all are there from the beginning


class Refused(Exception):
    """The server has given no answer: the agent gives up."""


class Answer(NamedTuple):
    times: list[float]  # when each token reached this process: time.perf_counter()
    computed: int | None  # tokens that the model computed before the first one; None: unknown


class Talk(Protocol):
    """An agent's conversation with its server."""

    async def turn(self, tokens: Sequence[int], new: int) -> Answer:
        """Appends these tokens to the context and generates `new` tokens. Raises Refused."""

    def waiting(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        """The context lasts as long as the agent's tool works. Raises Refused."""

    async def close(self) -> None: ...


class Server(Protocol):
    async def begin(self) -> Talk:
        """Begins a conversation. Raises Refused."""


class Turn(NamedTuple):
    agent: int
    number: int  # 0: the answer to the question
    asked: float  # when the tool ended, or the agent arrived
    answer: Answer


@dataclass
class Course:
    """The events of a run, with times of time.perf_counter()."""

    began: float = 0.0
    ended: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lives: list[tuple[float, float]] = field(default_factory=list)  # for each agent, its arrival and its end


class Run:
    """One run of a plan's agents. `tokens(n)` draws n tokens that the server has not seen.

    `count` gets the number of tokens that the agents' contexts grow by, and a negative number when an agent ends.
    """

    def __init__(
        self,
        work: Work,
        server: Server,
        tokens: Callable[[int], list[int]],
        count: Callable[[int], object] | None = None,
    ) -> None:
        self.work = work
        self.server = server
        self.tokens = tokens
        self.count = count or (lambda tokens: None)
        self.course = Course()

    async def __call__(self, limit_s: float | None = None) -> Course:
        """Runs all agents. After `limit_s` seconds the run is stopped and counts as failed; its answers until then
        count."""
        lives = [_Life(self, number, agent) for number, agent in enumerate(drawn(self.work))]
        try:
            async with asyncio.timeout(limit_s):
                await (self._open if self.work.rate else self._closed)(lives)
        except TimeoutError:
            self.course.ended = time.perf_counter()
            self.course.began = self.course.began or self.course.ended  # some agents have not asked their question
            self.course.failures.append(f"broken off after {limit_s:g} s")
        return self.course

    async def _open(self, lives: Sequence[_Life]) -> None:
        self.course.began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for life in lives:
                group.create_task(self._visit(life))
        self.course.ended = time.perf_counter()

    async def _visit(self, life: _Life) -> None:
        await asyncio.sleep(self.course.began + life.agent.arrives_s - time.perf_counter())
        try:
            await life.begin()
            await life.go_on()
        finally:
            await life.end()

    async def _closed(self, lives: Sequence[_Life]) -> None:
        asking = asyncio.Semaphore(ASKING)

        async def begin(life: _Life) -> None:
            async with asking:
                await life.begin()

        try:
            async with asyncio.TaskGroup() as group:
                for life in lives:
                    group.create_task(begin(life))
            self.course.began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for life in lives:
                    group.create_task(life.go_on())
            self.course.ended = time.perf_counter()
        finally:
            for life in lives:
                await life.end()


class _Life:
    def __init__(self, run: Run, number: int, agent: Agent) -> None:
        self.agent = agent
        self._run = run
        self._number = number
        self._talk: Talk | None = None
        self._failed = False
        self._began = 0.0
        self._tokens = 0

    async def begin(self) -> None:
        """Waits for the agent's arrival and asks its question."""
        question = self._run.tokens(self._run.work.context)
        self._began = time.perf_counter()
        try:
            self._talk = await self._run.server.begin()
        except Refused as error:
            self._fail(0, error)
            return
        await self._turn(0, self._began, question, self._run.work.first)

    async def go_on(self) -> None:
        """Runs all loops of the agent."""
        for number, wait in enumerate(self.agent.waits, 1):
            if self._talk is None or self._failed:
                return
            observation = self._run.tokens(self._run.work.observation)
            try:
                async with self._talk.waiting(wait):
                    await asyncio.sleep(wait.seconds)
                    tool_ended = time.perf_counter()
            except Refused as error:
                self._fail(number, error)
                return
            await self._turn(number, tool_ended, observation, self._run.work.answer)

    async def end(self) -> None:
        if self._talk is not None:
            await self._talk.close()
            self._run.count(-self._tokens)
        if self._began:
            self._run.course.lives.append((self._began, time.perf_counter()))

    async def _turn(self, number: int, asked: float, tokens: Sequence[int], new: int) -> None:
        assert self._talk is not None
        try:
            answer = await self._talk.turn(tokens, new)
        except Refused as error:
            self._fail(number, error)
            return
        self._run.course.turns.append(Turn(self._number, number, asked, answer))
        self._tokens += len(tokens) + new
        self._run.count(len(tokens) + new)

    def _fail(self, number: int, error: Refused) -> None:
        self._failed = True
        self._run.course.failures.append(f"agent {self._number}, turn {number}: {error}")
