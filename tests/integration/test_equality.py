"""The daemon computes what transformers computes, whatever else is in the batch.

Sixteen sessions join each other during generation, and leave when they are done. Each gets the tokens that `generate`
gives for its prompt alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import djinn_client as djinn
from tests.support import reference
from tests.support.daemon import Daemon
from tests.support.parameters import long_except

NEW_TOKENS = 64
FIRST_PART = 20  # tokens of the first call, in sessions with two calls
PROMPT_LENGTHS = (600, 1, 256, 2, 17, 512, 64, 255, 33, 599, 128, 257, 16, 301, 511, 5)  # pages have 256 tokens
VOCABULARY = 512
# One family of each kind. tests/unit/model/test_families.py has all of them, without a daemon.
THROUGH_A_DAEMON = (
    *("llama-2", "llama-3.1", "mistral", "qwen2", "qwen3", "gpt2", "gpt-j", "gemma-3"),
    *("mixtral", "qwen3-moe", "gpt-oss"),
)
EACH_FAMILY = pytest.mark.parametrize(
    "family",
    long_except(("gemma-3",), THROUGH_A_DAEMON),  # RoPE and layouts differ between Gemma-3's blocks
    indirect=True,
)


@dataclass(frozen=True)
class Plan:
    """One session. It joins when the session before it has `after` new tokens."""

    prompt: list[int]
    after: int
    calls: tuple[int, ...]  # new tokens of each call
    is_cancelled: bool = False  # during the first call, after half of its tokens

    @property
    def new_tokens(self) -> int:
        return sum(self.calls)


def plans() -> list[Plan]:
    draw = random.Random(25)  # with this seed no two logits of any family are closer than 1e-4
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
    two_calls = (FIRST_PART, NEW_TOKENS - FIRST_PART)
    return [
        Plan(prompt, after=(0, 1, 3, 6)[n % 4], calls=two_calls if n % 3 == 0 else (NEW_TOKENS,), is_cancelled=n == 7)
        for n, prompt in enumerate(prompts)
    ]


class Progress:
    """The number of new tokens of each session; sessions wait for it to change."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._changed = asyncio.Condition()

    async def add(self, session: int, tokens: int) -> None:
        async with self._changed:
            self._tokens[session] += tokens
            self._changed.notify_all()

    async def reached(self, session: int, tokens: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._tokens[session] >= tokens)


async def all_at_once(address: str, model: str, sessions: list[Plan]) -> list[list[int]]:
    """Runs all sessions and returns their tokens behind the prompts. Second calls begin when all sessions have
    joined."""
    progress = Progress()
    last = len(sessions) - 1

    async def live(number: int, plan: Plan) -> list[int]:
        if number > 0:
            await progress.reached(number - 1, plan.after)
        async with djinn.AsyncSession(model, address=address) as s:
            prompt: list[int] | None = plan.prompt
            for call, count in enumerate(plan.calls):
                if call > 0:
                    await progress.reached(last, 1)
                await read(s, number, prompt, count, plan.is_cancelled)
                prompt = None
            tokens = await s.token_ids()
        assert tokens[: len(plan.prompt)] == plan.prompt
        return tokens[len(plan.prompt) :]

    async def read(
        s: djinn.AsyncSession, number: int, prompt: list[int] | None, count: int, is_cancelled: bool
    ) -> None:
        got = 0
        async for piece in s.stream(prompt, max_tokens=count, ignore_eos=True):
            got += len(piece.token_ids)
            await progress.add(number, len(piece.token_ids))
            if is_cancelled and got >= count // 2:
                return

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(live(number, plan)) for number, plan in enumerate(sessions)]
    return [task.result() for task in running]


@EACH_FAMILY
def test_greedy_tokens(family: Path, roomy_daemon: Daemon) -> None:
    sessions = plans()
    answers = asyncio.run(all_at_once(roomy_daemon.address, str(family), sessions))
    for plan, answer in zip(sessions, answers, strict=True):
        if plan.is_cancelled:
            assert plan.new_tokens // 2 <= len(answer) <= plan.new_tokens
        count = len(answer) if plan.is_cancelled else plan.new_tokens
        assert answer == reference.greedy(family, plan.prompt, count, answer), f"prompt of {len(plan.prompt)} tokens"


@EACH_FAMILY
def test_logits_of_forward(family: Path, roomy_daemon: Daemon) -> None:
    """Computes a prompt in parts: one part ends a page, and one crosses the next page's end."""
    draw = random.Random(3)
    prompt = [draw.randrange(VOCABULARY) for _ in range(600)]
    with djinn.Session(str(family), address=roomy_daemon.address) as s:
        parts = [s.forward(prompt[first:end]) for first, end in ((0, 1), (1, 256), (256, 590), (590, 600))]
        assert s.token_ids() == prompt
    np.testing.assert_allclose(np.concatenate(parts), reference.logits(family, prompt), rtol=0, atol=1e-4)
