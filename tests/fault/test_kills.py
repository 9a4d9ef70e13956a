"""The engine, the daemon, or both die by SIGKILL at random moments, again and again, while sessions run, stream, wait,
are paused to host or disk, fork, and are cut. After each death every session that a client knows of is there, with
every token that the client has received, and continues with the same tokens as without the death.

DJINND_TEST_SEED repeats a run, except for the timing of other processes. DJINND_TEST_KILLS makes it longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

import djinn_client as djinn
from djinn_client import AsyncSession, ConnectionLost, EngineLost, SessionBusy
from tests.conftest import MODEL, DaemonStarter
from tests.support.lives import Lives

KILLS = int(os.environ.get("DJINND_TEST_KILLS", "12"))  # in the long run
SEED = int(os.environ.get("DJINND_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))
FLEETS = 2  # daemons side by side: one dies while the other starts
ENGINES = 3  # most engines killed in one daemon's life: the delay before the next one would grow

# A page has 256 tokens. The sessions need 20 pages and more, so some always have to leave the device, and the host.
TIERS = {"kv": "13MiB", "host_kv": "10MiB", "disk_kv": "24MiB"}
SESSIONS, MOST_SESSIONS = 6, 9
PROMPTS = [40, 200, 255, 256, 500, 700]  # tokens
STORY = 200  # tokens after a prompt
LONG = 60  # most tokens of a call: some end before the kill
NEXT = 3  # tokens compared after a kill
LONGEST = 0.15  # longest time in seconds from the beginning of the sessions' work to the kill

T = TypeVar("T")


@dataclass(eq=False)
class Told:
    """The test's knowledge of a session: its tokens are the first of `story`, at least `least` and at most `most` of
    them."""

    session: AsyncSession
    story: list[int]
    prompt: int
    least: int
    most: int


class Fleet:
    """The sessions and their work. A call that a death interrupts fails with an error that says so, and no other."""

    def __init__(self, lives: Lives, choice: random.Random) -> None:
        self.lives = lives
        self.choice = choice
        self.sessions: list[Told] = []
        self.under_way: list[asyncio.Task[None]] = []
        self.doings: list[Callable[[Told], Awaitable[None]]] = [
            self.rest,
            self.stream,
            self.stream,
            self.pause,
            self.pause_in_mid_stream,
            self.wait,
            self.fork,
            self.cut,
        ]
        self.done = dict.fromkeys((doing.__name__ for doing in self.doings), 0)

    async def open(self) -> None:
        """Opens sessions with their prompts, and finds the tokens that each generates without deaths."""

        async def tell(length: int) -> Told:
            prompt = [self.choice.randrange(4, 2000) for _ in range(length)]
            async with AsyncSession(MODEL, address=self.lives.address) as whole:
                answer = await whole.generate(prompt, max_tokens=STORY, ignore_eos=True)
            session = await AsyncSession(MODEL, address=self.lives.address).open()
            await session.generate(prompt, max_tokens=1, ignore_eos=True)
            return Told(session, prompt + answer.token_ids, length, length + 1, length + 1)

        self.sessions = list(await asyncio.gather(*map(tell, PROMPTS)))

    # --- work that a death may interrupt ------------------------------------------------------------------------------

    def begin(self) -> list[asyncio.Task[None]]:
        self.under_way = [asyncio.create_task(self._do(told)) for told in list(self.sessions)]
        return self.under_way

    async def _do(self, told: Told) -> None:
        doing = self.choice.choice(self.doings)
        with suppress(ConnectionLost):
            await doing(told)
            self.done[doing.__name__] += 1

    async def rest(self, told: Told) -> None:
        pass

    async def stream(self, told: Told) -> None:
        """The death of an engine ends no call. The death of the daemon leaves the tokens that were sent."""
        before, left = told.least, self.choice.randint(0, min(LONG, len(told.story) - told.most))
        if not left:
            return
        told.most += left
        heard: list[int] = []
        async for piece in told.session.stream(max_tokens=left, ignore_eos=True):
            heard += piece.token_ids
            told.least = before + len(heard)
        assert heard == told.story[before : before + left]

    async def pause(self, told: Told) -> None:
        await told.session.pause(tier=self.choice.choice(["host", "disk"]))

    async def pause_in_mid_stream(self, told: Told) -> None:
        stream = asyncio.create_task(self.stream(told))
        await asyncio.sleep(self.choice.uniform(0, 0.05))
        try:
            await self.pause(told)
            if self.choice.random() < 0.5:
                await told.session.unpause()
        finally:
            await stream

    async def wait(self, told: Told) -> None:
        await told.session.signal("IO_WAIT", expected_s=self.choice.choice([0.0, 0.02, 5.0]))
        await asyncio.sleep(self.choice.uniform(0, 0.05))
        await told.session.signal("COMPUTE")

    async def fork(self, told: Told) -> None:
        child = await told.session.fork()
        if len(self.sessions) >= MOST_SESSIONS:
            await child.close()
            return
        self.sessions.append(Told(child, told.story, told.prompt, told.least, told.most))

    async def cut(self, told: Told) -> None:
        told.least = self.choice.randint(told.prompt, told.least)
        await told.session.truncate(told.least)
        told.most = told.least

    async def unpause(self) -> None:
        while not all(task.done() for task in self.under_way):
            await asyncio.gather(*(again(told.session.unpause) for told in self.sessions))
            await asyncio.wait(self.under_way, timeout=0.1)

    # --- afterwards ---------------------------------------------------------------------------------------------------

    async def check(self, victim: str) -> None:
        await asyncio.gather(*(self._check(told, victim) for told in self.sessions))

    async def _check(self, told: Told, victim: str) -> None:
        if victim != "engine" or self.choice.random() < 0.2:
            await told.session.detach()
            told.session = await again(djinn.AsyncSession.attach, told.session.id, address=self.lives.address)
        await again(told.session.unpause)
        tokens = await again(lambda: told.session.token_ids())
        assert told.least <= len(tokens) <= told.most, f"{told.least} to {told.most} were sent, {len(tokens)} are there"
        assert tokens == told.story[: len(tokens)], "the client has received these tokens"
        if len(tokens) + NEXT > len(told.story):
            await told.session.truncate(told.prompt + 1)
            del tokens[told.prompt + 1 :]
        told.least = told.most = len(tokens)
        answer = await again(told.session.generate, max_tokens=NEXT, ignore_eos=True)
        assert answer.token_ids == told.story[len(tokens) : len(tokens) + NEXT], "the same tokens as without the death"
        told.least = told.most = len(tokens) + NEXT


async def again(call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
    """Makes the call, and repeats it while the last death still causes errors."""
    while True:
        try:
            return await call(*arguments, **options)
        except (EngineLost, ConnectionLost, SessionBusy):
            await asyncio.sleep(0.02)


def plan(choice: random.Random, kills: int) -> list[str]:
    """The victims of one fleet, in order: engines, and after some of them the daemon, or both at once."""
    deaths: list[str] = []
    while len(deaths) < kills // FLEETS:
        deaths += ["engine"] * choice.randint(ENGINES - 1, ENGINES) + [choice.choice(["daemon", "daemon", "both"])]
    return deaths


async def live_and_die(fleet: Fleet, deaths: list[str]) -> None:
    await fleet.open()
    for victim in deaths:
        engine = await asyncio.to_thread(fleet.lives.engine)
        doing = fleet.begin()
        await asyncio.sleep(fleet.choice.uniform(0, LONGEST))
        if victim != "daemon":
            os.kill(engine, signal.SIGKILL)
        if victim != "engine":
            await asyncio.to_thread(fleet.lives.kill)
        else:
            await fleet.unpause()  # a pause, and the call that it holds, outlive the engine
        await asyncio.gather(*doing)
        if victim != "engine":
            fleet.lives.again(ready=False)
            await asyncio.to_thread(fleet.lives.now.wait_until_ready)
        await fleet.check(victim)
        assert await asyncio.to_thread(findings, fleet.lives) == []
    for told in fleet.sessions:
        await told.session.close()


def findings(lives: Lives) -> list[str]:
    with lives.now.client() as client:
        return client.status(check=True).integrity


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [3, pytest.param(KILLS, marks=pytest.mark.long)])
def test_no_death_loses_a_session_or_a_token(start_daemon: DaemonStarter, kills: int) -> None:
    print(f"seed {SEED}")
    choices = [random.Random(SEED + number) for number in range(FLEETS)]
    fleets = [Fleet(Lives(start_daemon, TIERS), choice) for choice in choices]
    deaths = [plan(choice, kills) for choice in choices]

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for fleet, whose in zip(fleets, deaths, strict=True):
                group.create_task(live_and_die(fleet, whose))

    asyncio.run(scenario())
    print(*(f"{Counter(whose)} while {fleet.done}" for fleet, whose in zip(fleets, deaths, strict=True)), sep="\n")
