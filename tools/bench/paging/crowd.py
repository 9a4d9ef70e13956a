"""Many sessions that are alive at once and are called in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import djinn_client as djinn
from tools.bench.harness.paged_model import MODEL, PagedModel
from tools.bench.harness.prompts import prompt


class Work(NamedTuple):
    sessions: int
    context: int  # tokens of each prompt
    new: int  # tokens that a session generates in a turn
    turns: int  # after the prompt
    ahead: int = 0  # a session sends COMPUTE so many sessions before its turn; 0: no session does
    sequential: bool = False

    @property
    def session_tokens(self) -> int:
        """Tokens of a session at its end; the prompt's call generates one."""
        return self.context + 1 + self.new * self.turns


@dataclass
class Answers:
    tokens: list[list[int] | None]  # generated tokens, by session; None: the session has failed
    seconds: float = 0.0
    computed_anew: set[int] = field(default_factory=set)  # sessions that had lost some KV when they were called
    failures: list[str] = field(default_factory=list)

    @property
    def served(self) -> int:
        return sum(tokens is not None for tokens in self.tokens)


async def ask(
    model: PagedModel,
    work: Work,
    at_once: int,
    kind: int,
    count: Callable[[int], object] = lambda tokens: None,
    groups: int = 1,
) -> Answers:
    """Calls all sessions, at most `at_once` of them at a time. Another `kind` has other prompts.

    `count` gets the number of tokens that sessions grow by. With several `groups`, the sessions of one group are closed
    before the next group begins.
    """
    answers = Answers([None] * work.sessions)
    began = time.perf_counter()
    size = -(-work.sessions // groups)
    for first in range(0, work.sessions, size):
        members = range(first, min(first + size, work.sessions))
        await _Group(model, work, at_once, kind, count, answers).run(members)
    answers.seconds = time.perf_counter() - began
    return answers


class _Group:
    def __init__(
        self,
        model: PagedModel,
        work: Work,
        at_once: int,
        kind: int,
        count: Callable[[int], object],
        answers: Answers,
    ) -> None:
        self._model = model
        self._work = work
        self._busy = asyncio.Semaphore(at_once)
        self._kind = kind
        self._count = count
        self._answers = answers

    async def run(self, members: Sequence[int]) -> None:
        sessions = {i: await djinn.AsyncSession(MODEL, address=self._model.address).open() for i in members}
        try:
            for turn in range(self._work.turns + 1):
                await asyncio.gather(*(self._turn(sessions, member, turn) for member in members))
        finally:
            for session in sessions.values():
                await session.close()

    async def _turn(self, sessions: dict[int, djinn.AsyncSession], member: int, turn: int) -> None:
        answers, work = self._answers, self._work
        async with self._busy:
            if turn and answers.tokens[member] is None:
                return  # the session has failed before
            try:
                if work.ahead:
                    await self._signal(sessions, member + work.ahead)
                reply = await self._call(sessions[member], member, turn)
            except djinn.DjinnError as error:
                answers.tokens[member] = None
                answers.failures.append(f"session {member}, turn {turn}: {error.code}: {error.message}")
                return
            answers.tokens[member] = (answers.tokens[member] or []) + reply.token_ids
            if turn and reply.usage.computed_tokens > 1:
                answers.computed_anew.add(member)
            self._count(reply.usage.prompt_tokens + reply.usage.generated_tokens)

    async def _signal(self, sessions: dict[int, djinn.AsyncSession], member: int) -> None:
        if member in sessions:
            await sessions[member].signal("COMPUTE")

    async def _call(self, session: djinn.AsyncSession, member: int, turn: int) -> djinn.Generated:
        work = self._work
        if turn:
            return await session.generate(max_tokens=work.new, ignore_eos=True)
        text = prompt(work.context, self._model.info.vocab, self._kind * work.sessions + member)
        return await session.generate(text, max_tokens=1, ignore_eos=True)
