"""A target and its draft on one CPU device, as in an engine, for tests without one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from djinnd.core.batch import Batch
from djinnd.device.cpu import CpuDevice
from djinnd.engine.drafts.drafter import Drafter
from djinnd.engine.memory.memory import KvPlan
from djinnd.engine.run.model_runner import ModelRunner
from tests.support.loaded import MEMORY, Served


class WithDraft(Served):
    """Serves a model as `Served` does; a draft guesses for it. Each step of the model seems to take `seconds`."""

    def __init__(self, folder: Path, draft: Path | None, draft_plan: KvPlan, seconds: float = 1.0, **more: Any) -> None:
        self._stack = ExitStack()
        device = CpuDevice(2 * MEMORY)
        self._stack.callback(device.close)
        self.seconds = seconds
        self.drafter: Drafter | None = None
        self.guesses = 0  # rows with a guess of the draft
        if draft is not None:
            other = self._stack.enter_context(Served(draft, device, plan=draft_plan, name="draft"))
            self.other = other
        super().__init__(folder, device, **more)
        if draft is not None:
            builder = self.scheduler.queues["m"].batch_builder
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
            self.complete(batch, self.runner.run(batch), self.seconds)
            self.runner.settle()
        return batch
