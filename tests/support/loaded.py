"""A model on a device without an engine: loaded as the engine loads it, and run a step at a time."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from djinn_client.protocol import Class, Placing, Sampling
from djinnd.core.batch import LATE, Batch
from djinnd.core.edits import FOREVER, now
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.device.cpu import CpuDevice
from djinnd.engine.load.loading import model_shape
from djinnd.engine.load.planning import reserved_bytes
from djinnd.engine.memory.memory import KvPlan, ModelShape, workspace_label
from djinnd.engine.run.hidden_states import HiddenStates
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.run.page_memory import PageMemory, kv_label
from djinnd.engine.run.prepare_model import prepare_model
from djinnd.messages import Load
from djinnd.model.check.equality import check_paging
from djinnd.model.placing.loader import Weights
from djinnd.model.sampling.sampler import Sampled
from djinnd.model.states.layout import state_bytes
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.page_regions import layout_of
from djinnd.model.step.paged_model import PagedModel
from djinnd.scheduler.scheduler import Scheduler
from tests.support.open_files import loader_of

MEMORY = 1 << 30  # bytes of a CPU device with room for any reduced model


def anonymous_arena(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
    """Private host memory, as an arena for `ModelLoader.run`."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8), None


def load_weights(
    folder: Path, device: Device, dtype: str = "auto", name: str = "m", placing: Placing | None = None
) -> Weights:
    return loader_of(folder, device, dtype, placing, name=name).run(anonymous_arena, lambda stage, done, total: None, 0)


def small_pages(pages: int, page_size: int = 16, max_context: int = 1024) -> KvPlan:
    """Pages so small that a session of a few dozen tokens has several. `pages`: without the scratch page."""
    return KvPlan(page_size, page_bytes=0, num_pages=pages + 1, max_context=min(max_context, pages * page_size))


def paged_model(weights: Weights, pages: int, page_size: int, device: Device | None = None) -> PagedModel:
    """A model with a pool of its own; with `device`, the pool is in its budget as "pool". `pages`: with the scratch
    page."""
    skeleton = weights.skeleton
    layout = layout_of(weights.dtype, page_size, skeleton.kv, state_bytes(skeleton.stateful))
    shape = (pages, layout.page_bytes)
    pool = torch.zeros(shape, dtype=torch.uint8) if device is None else device.allocate("pool", shape, torch.uint8)
    return PagedModel(weights.skeleton, weights.placement, weights.dtype, layout, pool.zero_())


def by_block(model: PagedModel) -> Tensor:
    """The pool of a model with equal blocks, [pages, blocks, 2, page_size, kv_heads, head_dim]."""
    layout = model.layout
    shape = (len(model.pool), layout.blocks, 2, layout.page_size, layout.kv_heads, layout.head_dim)
    return model.pool.view(model.dtype).view(shape)


def check_all(model: PagedModel, max_context: int, *, again: bool = False) -> None:
    """Runs the whole check at load at once."""
    for _ in check_paging(model, max_context, again=again):
        pass


def made_runner(
    load: Load, weights: Weights, shape: ModelShape, device: Device, max_batch_tokens: int, max_rows: int
) -> ModelRunner:
    """The runner of a model that has passed its check. Raises OutOfMemory or ModelRejected."""
    parts = prepare_model(load, weights, shape, device, max_batch_tokens, max_rows)
    try:
        while True:
            next(parts)
    except StopIteration as prepared:
        runner: ModelRunner = prepared.value
        return runner


def _runner_with(
    plan: KvPlan, weights: Weights, figures: ModelShape, device: Device, max_tokens: int, max_rows: int
) -> ModelRunner:
    layout = layout_of(figures.kv_dtype(weights.dtype), plan.page_size, weights.skeleton.kv, figures.state_bytes)
    device.budget.reserve(workspace_label(weights.name), 0)
    pool = device.allocate(kv_label(weights.name), (plan.num_pages, layout.page_bytes), torch.uint8, zero=True)
    model = PagedModel(weights.skeleton, weights.placement, weights.dtype, layout, pool)
    check_all(model, plan.max_context)
    load, hidden = Load(0, weights.name, ""), None
    if weights.skeleton.head_input is not None:
        hidden = HiddenStates(device, weights.name, max_tokens, figures.width, weights.dtype)
    pages = PageMemory(weights.name, model, plan, device)
    runner = ModelRunner(load, weights, model, figures, pages, device, max_tokens, max_rows, hidden)
    if hidden is not None:
        runner.use_hidden_states(hidden)
    return runner


class Served:
    """A scheduler and the runner of one model, as in an engine."""

    def __init__(
        self,
        folder: Path,
        device: Device | None = None,
        *,
        dtype: str = "auto",
        plan: KvPlan | None = None,
        max_batch_tokens: int = 64,
        max_rows: int = 32,
        placing: Placing | None = None,
        name: str = "m",
    ) -> None:
        """`plan`: see `small_pages`. None: the engine's plan, with pages of 256 tokens for a reduced model."""
        self.device = device or CpuDevice(MEMORY)
        self._owns_device = device is None
        loader = loader_of(folder, self.device, dtype, placing, name=name)
        shape = model_shape(loader)
        budget = self.device.budget
        reserved = reserved_bytes(loader, shape, 0, max_batch_tokens, budget.total, budget.free)
        weights = loader.run(anonymous_arena, lambda stage, done, total: None, reserved)
        if plan is None:
            load = Load(0, name, str(folder), placing=placing or Placing())
            self.runner = made_runner(load, weights, shape, self.device, max_batch_tokens, max_rows)
        else:
            self.runner = _runner_with(plan, weights, shape, self.device, max_batch_tokens, max_rows)
        self.scheduler = Scheduler(max_batch_tokens, max_rows)
        self.scheduler.add_model(name, self.runner.kv, self.runner.plan.max_context, self.runner.model.num_blocks)
        self._numbers = count(1)

    def close(self) -> None:
        self.runner.release()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def shuffle_pages(self) -> None:
        """From now on sessions get pages in random order."""
        kv = self.runner.kv
        holders = [f"shuffle-{page}" for page in range(kv.pool.free)]
        for holder in holders:
            kv.reserve(holder, tenant=0, tokens=1)
        random.Random(0).shuffle(holders)
        for holder in holders:
            kv.drop(holder)

    def open(self, tenant: int = 0, priority: Class = "agent") -> Session:
        session = Session(f"s{next(self._numbers)}", "m", tenant, priority)
        self.scheduler.open(session)
        return session

    def fork(self, parent: Session) -> Session:
        name = f"s{next(self._numbers)}"
        copy = self.scheduler.fork(parent.id, name, "agent")
        if copy is not None:
            self.runner.pages.copy(*copy)
        return self.scheduler.session(name)

    def submit(
        self,
        session: Session,
        tokens: Sequence[int],
        max_tokens: int = 0,
        sampling: Sampling | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> Request:
        """Without `max_tokens` and `prompt_logprobs`, this is a forward pass; `logits_of` returns its logits."""
        first, end = len(session.tokens), len(session.tokens) + len(tokens)
        request = Request(
            id=next(self._numbers),
            first=first,
            prompt_end=end,
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logits=not max_tokens and prompt_logprobs is None,
            seen_from=FOREVER if max_tokens else first,
            **more,
        )
        if prompt_logprobs is not None:
            request.seen_from = now(first)
        self.scheduler.submit(session.id, request, tokens)
        if request.logits:
            self.runner.open_window(request)
        return request

    def logits_of(self, request: Request) -> Tensor:
        """A copy, float32 [tokens, vocab]. Closes the window."""
        window = self.runner.forget(request)
        assert window is not None
        with mmap.mmap(window.fd, window.tokens * window.vocab * 4) as memory:
            logits = torch.frombuffer(memory, dtype=torch.float32).view(window.tokens, window.vocab).clone()
        window.close()
        return logits

    def step(self) -> Batch | None:
        """Composes, runs and completes one batch. → None if there is nothing to run."""
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.complete(batch, self.runner.run(batch))
            self.runner.settle()
        return batch

    def complete(self, batch: Batch, sampled: Sampled, seconds: float = 0.0) -> None:
        tokens: list[int | None] = [*sampled.tokens]
        for index in sampled.late:
            tokens[index] = LATE
        further = {index: [token for token, _ in some] for index, some in sampled.further.items()}
        for request in self.scheduler.complete(batch, tokens, seconds, further):
            if not request.logits:
                self.runner.forget(request)
        self.scheduler.check_integrity()

    def run(self) -> list[Batch]:
        """Runs steps until there is nothing to run."""
        batches = []
        while (batch := self.step()) is not None:
            batches.append(batch)
        return batches


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(1, vocab, (length,), generator=generator).tolist()


InputRow = tuple[Sequence[int], int, Sequence[int]]  # tokens, position of the first, pages of the session


def fill(inputs: StepInputs, rows: Sequence[InputRow], page_size: int) -> None:
    """Writes `rows` into `inputs`. The logit_rows, and everything after the rows, stay as they are."""
    host, token = inputs.host, 0
    host["starts"][0] = 0
    for row, (tokens, start, pages) in enumerate(rows):
        host["table"][row] = 0
        host["table"][row, : len(pages)] = pages
        host["lengths"][row] = start + len(tokens)
        for position, value in enumerate(tokens, start):
            host["ids"][token], host["positions"][token] = value, position
            host["slots"][token] = pages[position // page_size] * page_size + position % page_size
            token += 1
        host["starts"][row + 1] = token
