"""A target and its draft on one device, as in an engine, for tests without one."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from djinn_client.protocol import Placing, Sampling
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.device.cpu import CpuDevice
from djinnd.engine.drafts.drafter import Drafter
from djinnd.engine.drafts.head_drafter import HeadDrafter
from djinnd.engine.memory.memory import KvPlan
from djinnd.engine.run.model_runner import ModelRunner
from tests.support.loaded import MEMORY, Served, random_prompt, small_pages

_SESSIONS = 12


class WithDraft(Served):
    """Serves a model as `Served` does; a draft, or the head of a checkpoint, guesses for it. Each step of the model
    seems to take `seconds`."""

    def __init__(
        self,
        folder: Path,
        draft: Path | None,
        draft_plan: KvPlan,
        seconds: float = 1.0,
        *,
        is_head: bool = False,
        device: Device | None = None,
        **more: Any,
    ) -> None:
        """device: the caller's. None: a CPU device of its own."""
        self._stack = ExitStack()
        if device is None:
            device = CpuDevice(2 * MEMORY)
            self._stack.callback(device.close)
        self.seconds = seconds
        self.drafter: Drafter | None = None
        self.guesses = 0  # rows with a guess of the draft
        if draft is not None:
            limits: dict[str, Any] = {"dtype": more.get("dtype", "auto")}
            if is_head:
                limits["max_batch_tokens"] = more.get("max_batch_tokens", 64)
            placing = Placing(part="heads") if is_head else None
            served = Served(draft, device, plan=draft_plan, name="draft", placing=placing, **limits)
            other = self._stack.enter_context(served)
            self.other = other
        super().__init__(folder, device, **more)
        if draft is not None:
            builder = self.scheduler.queues["m"].batch_builder
            if is_head:
                self.drafter = HeadDrafter(other.runner, self.runner, builder)
            else:
                self.drafter = Drafter(other.runner, self.runner.model.vocab, builder)

    @property
    def draft(self) -> ModelRunner:
        return self.other.runner

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.release()
            self.other.runner.kv.check_integrity()
        super().close()
        self._stack.close()

    def step(self) -> Batch | None:
        batch = self.scheduler.next_batch()
        if batch is not None:
            if self.drafter is not None:
                before = sum(bool(row.guess) for row in batch.rows)
                batch = self.drafter.added(batch, lambda: False)
                self.guesses += sum(bool(row.guess) for row in batch.rows) - before
                self.draft.kv.check_integrity()
            self.finish(batch)
        return batch

    def finish(self, batch: Batch) -> None:
        """Runs a batch with its guesses, and completes it."""
        launched = self.runner.launch(batch)
        if self.drafter is not None:
            self.drafter.launched()
        self.complete(batch, self.runner.finish(launched), self.seconds)
        self.runner.settle()


def lives(
    folder: Path, draft: Path | None, pages: int, draft_pages: int, temperature: float, *, is_head: bool = False
) -> tuple[list[list[int]], list[Request], int, int]:
    """The tokens of sessions that join, leave, are cut, forked and paused; their requests; steps, and guesses."""
    chance, requests, steps = random.Random(5), list[Request](), 0
    options = {"plan": small_pages(pages), "max_batch_tokens": 128}
    with WithDraft(folder, draft, small_pages(draft_pages), is_head=is_head, **options) as served:
        vocab = served.runner.model.vocab

        def ask(session: Session, prompt: list[int]) -> None:
            sampling = Sampling(temperature=temperature, seed=len(requests))
            more = {"may_guess": True, "stop_tokens": frozenset([chance.randrange(vocab)])}
            requests.append(served.submit(session, prompt, chance.randint(8, 40), sampling, **more))

        sessions = [served.open(tenant=number % 2) for number in range(_SESSIONS)]
        for number, session in enumerate(sessions):
            ask(session, random_prompt(chance.randint(3, 90), vocab, number))
            steps += sum(served.step() is not None for _ in range(2))
        steps += len(served.run())
        forks = []
        for session in sessions[::2]:
            served.scheduler.truncate(session.id, chance.randrange(5, len(session.tokens)))
            forks.append(served.fork(session))
            for one in (session, forks[-1]):
                ask(one, random_prompt(chance.randint(1, 50), vocab, 7))
        steps += len(served.run())
        for session in sessions[1::4]:
            served.scheduler.pause(session.id)
            served.scheduler.resume(session.id)
            ask(session, [3, 4])
        steps += len(served.run())
        return [session.tokens for session in (*sessions, *forks)], requests, steps, served.guesses
