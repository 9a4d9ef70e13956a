"""Serves a load by a daemon. Each session is a client of its own; all are in one process and one event loop.

Tenants are users. Tenant 0 of a load is the user of this process. The others are user ids that need not exist, and only
root can take them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import count
from pathlib import Path

import click

import djinn_client as djinn
from tools.bench.harness.prompts import prompt
from tools.bench.loads.course import Course
from tools.bench.loads.load import Call, Group, Load, Visit, visits

FIRST_USER = 61_000  # of tenant 1; tenant 2 is the next one
OPENING = 16  # sessions that open at a time


def user_of(tenant: int) -> int:
    return FIRST_USER + tenant if tenant else os.geteuid()


def expect_tenants(load: Load) -> None:
    """Raises ClickException where this process cannot take the tenants' user ids."""
    if any(load.tenants) and os.geteuid() != 0:
        raise click.ClickException("several tenants are several users: run this as root, who can be all of them")


def open_to_all(address: str) -> None:
    """Opens the socket of a private daemon to all users."""
    Path(address).parent.chmod(0o755)
    os.chmod(address, 0o666)


async def serve(address: str, model: str, vocab: int, load: Load, begun: Callable[[], None] = lambda: None) -> Course:
    """Runs the load. Its time begins when all sessions of the beginning are open; calls that run at its end are
    cancelled.

    `begun` is called at the beginning. Raises DjinnError where a session cannot be opened.
    """
    run = _Run(address, model, vocab, load)
    going = asyncio.create_task(run.go())
    lives = [asyncio.create_task(run.live(following)) for following in visits(load)]
    try:
        ended, _ = await asyncio.wait([going, *lives], return_when=asyncio.FIRST_COMPLETED)
        for each in ended:
            each.result()  # no session lives yet, so this is `going` or a session that could not be opened
        begun()
        await asyncio.wait(lives, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
        run.course.ended = time.perf_counter()
        for life in lives:
            if life.done():
                life.result()
    finally:
        for each in (going, *lives):
            each.cancel()
        await asyncio.gather(going, *lives, return_exceptions=True)
    return run.course


class _Run:
    def __init__(self, address: str, model: str, vocab: int, load: Load) -> None:
        self.load = load
        self.course = Course(0.0)
        self._address = address
        self._model = model
        self._vocab = vocab
        self._seeds = count(time.time_ns())
        self._opening = asyncio.Semaphore(OPENING)
        self._effective_user = asyncio.Lock()
        self._unopened = sum(group.sessions for group in load.groups.values() if not group.rate)
        self._may_begin = asyncio.Event()
        self._has_begun = asyncio.Event()
        if not self._unopened:
            self._may_begin.set()

    async def go(self) -> None:
        await self._may_begin.wait()
        self.course.began = time.perf_counter()
        self._has_begun.set()

    async def live(self, following: Iterator[Visit]) -> None:
        """Runs sessions that follow one another."""
        is_first = True
        for visit in following:
            group = self.load.groups[visit.group]
            if group.rate:
                await self._has_begun.wait()
                await asyncio.sleep(self.course.began + visit.arrives_s - time.perf_counter())
            elif not is_first:
                await asyncio.sleep(visit.rest_s)
            async with self._session(group, visit.tenant) as session:
                if is_first and not group.rate:
                    await self._opened()
                await _Client(self, session, visit, group).calls()
            is_first = False

    async def _opened(self) -> None:
        self._unopened -= 1
        if not self._unopened:
            self._may_begin.set()
        await self._has_begun.wait()

    @asynccontextmanager
    async def _session(self, group: Group, tenant: int) -> AsyncIterator[djinn.AsyncSession]:
        session = djinn.AsyncSession(self._model, priority=group.priority, address=self._address)
        if tenant:
            async with self._effective_user:  # connections are made as the effective user
                os.seteuid(user_of(tenant))
                try:
                    await session.open()
                finally:
                    os.seteuid(0)
        else:
            async with self._opening:
                await session.open()
        try:
            yield session
        finally:
            await session.close()

    def prompt(self, tokens: int) -> list[int]:
        """Draws a prompt that the daemon has not seen."""
        return prompt(tokens, self._vocab, next(self._seeds))


class _Client:
    def __init__(self, run: _Run, session: djinn.AsyncSession, visit: Visit, group: Group) -> None:
        self._run = run
        self._course = run.course
        self._session = session
        self._visit = visit
        self._group = group

    async def calls(self) -> None:
        asked, wakes = time.perf_counter(), False
        for number, call in enumerate(self._visit.calls):
            tokens = self._run.prompt(call.tokens)
            if number:
                asked, wakes = await self._pause(call), self._group.tells != "none"
            try:
                await self._call(tokens, call.answer, asked, wakes=wakes)
                if self._group.forgets:
                    await self._session.truncate(0)
            except djinn.DjinnError as error:
                self._course.groups[self._visit.group].failures[error.code] += 1
                return

    async def _call(self, tokens: list[int], answer: int, asked: float, *, wakes: bool) -> None:
        before: float | None = None
        group, tenant = self._visit.group, self._visit.tenant
        async for piece in self._session.stream(tokens, max_tokens=answer, ignore_eos=True):
            now = time.perf_counter()
            for _ in piece.token_ids:
                if before is None:
                    self._course.first(group, tenant, len(tokens), asked, now, wakes)
                self._course.token(group, tenant, before, now)
                before = now

    async def _pause(self, call: Call) -> float:
        """Waits for the pause of a call. Returns its end."""
        async with self._told(call.pause_s):
            await asyncio.sleep(call.pause_s)
            return time.perf_counter()

    def _told(self, pause_s: float) -> AbstractAsyncContextManager[None]:
        match self._group.tells:
            case "none":
                return nullcontext()
            case "signals":
                return self._session.io_wait()
            case "tool":
                return self._session.io_wait(tool=self._visit.group)
            case "expected":
                return self._session.io_wait(expected_s=pause_s)
