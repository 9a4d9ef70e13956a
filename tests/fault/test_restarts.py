"""Fifty sessions and a restart: the next daemon finds their pages where the last one left them, recomputes none of
those, and continues as if it had never stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import djinn_client as djinn
from djinn_client import AsyncSession
from djinn_client.protocol import Tier
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.lives import Lives

SESSIONS = 50
ROOM = {"kv": "96MiB", "host_kv": "96MiB", "disk_kv": "96MiB"}  # a page has 256 tokens and 1 MiB
NEXT = 4  # tokens that are compared
LENGTHS = [20, 255, 256, 300]  # of prompts, in tokens


class Fifty:
    """Sessions of one daemon and of its successors. `next` are the tokens to come."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.ids: list[str] = []
        self.tokens: list[list[int]] = []
        self.next: list[list[int]] = []
        self.computed: list[int] = []  # by the last `go_on`, for each session

    def open(self) -> None:
        async def one(number: int) -> None:
            s = await AsyncSession(MODEL, address=self.lives.address).open()
            prompt = [number + 10, *range(100, 99 + LENGTHS[number % len(LENGTHS)])]
            await s.generate(prompt, max_tokens=NEXT, ignore_eos=True)
            self.ids[number], self.tokens[number] = s.id, await s.token_ids()
            fork = await s.fork()
            self.next[number] = (await fork.generate(max_tokens=NEXT, ignore_eos=True)).token_ids
            await fork.close()
            await s.detach()

        self.ids, self.tokens, self.next = [""] * SESSIONS, [[]] * SESSIONS, [[]] * SESSIONS
        each(one, range(SESSIONS))

    def pause(self, tier: Tier, which: Iterable[int] = range(SESSIONS)) -> None:
        async def one(number: int) -> None:
            s = await djinn.AsyncSession.attach(self.ids[number], address=self.lives.address)
            told = await s.pause(tier)
            assert told.pages == -(-(len(self.tokens[number]) - 1) // 256)
            await s.detach()

        each(one, which)

    def pages(self, tier: Tier) -> list[int]:
        infos = {info.id: info for info in djinn.sessions(address=self.lives.address)}
        return [getattr(infos[id], f"{tier}_pages") for id in self.ids]

    def go_on(self) -> None:
        """Checks that all sessions are there with their tokens, and that the next tokens are right."""

        async def one(number: int) -> None:
            s = await djinn.AsyncSession.attach(self.ids[number], address=self.lives.address)
            assert await s.token_ids() == self.tokens[number]
            answer = await s.generate(max_tokens=NEXT, ignore_eos=True)
            assert answer.token_ids == self.next[number]
            self.computed[number] = answer.usage.computed_tokens
            await s.detach()

        self.computed = [-1] * SESSIONS
        began = time.monotonic()
        each(one, range(SESSIONS))
        print(f"attached and went on: {time.monotonic() - began:.2f} s")
        assert djinn.status(check=True, address=self.lives.address).integrity == []


def each(act: Callable[[int], Awaitable[Any]], which: Iterable[int]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*map(act, which))

    asyncio.run(all_of_them())


def test_a_warm_restart(start_daemon: DaemonStarter) -> None:
    lives = Lives(start_daemon, ROOM)
    fifty = Fifty(lives)
    fifty.open()
    with lives.now.client() as client:
        print(f"restarted: {restart(client, warm=True).seconds:.2f} s")
    lives.wait_for_tiers()
    assert all(fifty.pages("host"))
    fifty.go_on()
    assert fifty.computed == [1] * SESSIONS, "only the last token of each session"


def test_the_daemon_is_killed_and_the_pages_are_on_the_host(start_daemon: DaemonStarter) -> None:
    lives = Lives(start_daemon, ROOM)
    fifty = Fifty(lives)
    fifty.open()
    fifty.pause("host")
    lives.kill()
    lives.again()
    lives.wait_for_tiers()
    assert all(fifty.pages("host"))
    fifty.go_on()
    assert fifty.computed == [1] * SESSIONS


def test_a_clean_stop_keeps_pages_on_disk(start_daemon: DaemonStarter) -> None:
    lives = Lives(start_daemon, ROOM)
    fifty = Fifty(lives)
    fifty.open()
    kept = range(0, SESSIONS, 2)
    fifty.pause("disk", kept)
    lives.stop()
    lives.again()
    lives.wait_for_tiers()
    assert [number for number, pages in enumerate(fifty.pages("disk")) if pages] == list(kept)
    fifty.go_on()
    for number, computed in enumerate(fifty.computed):
        if number not in kept:
            assert computed == len(fifty.tokens[number])
    # When the times of reading and computing are known, the cheaper way is taken; until then, pages are read.
    assert 1 in fifty.computed
