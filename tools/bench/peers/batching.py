"""The agents' work in transformers' continuous batching, with its offload of KV to pinned host memory.

    python -m tools.bench.peers.batching JOB.json

It has no sessions: each turn is a new request, with the agent's whole conversation as its prompt. Requests share blocks
of equal prefixes as long as the cache keeps them, and only KV of running requests is offloaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tools.bench.agents.figures import Figures, figures
from tools.bench.agents.loop import Answer, Refused, Run
from tools.bench.agents.peer import Batched, BatchingJob
from tools.bench.agents.plan import Wait, Work
from tools.bench.harness.prompts import prompt
from tools.bench.stream.outcome import Status

GIB = 1 << 30
BATCH_TOKENS = 2048  # the most tokens of a step, as in the daemon


class Batching:
    """Begins agents' conversations: a Server. `manager` is transformers' ContinuousBatchingManager, with its own
    thread."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers = count()

    async def begin(self) -> BatchedTalk:
        return BatchedTalk(self._manager, lambda: f"request {next(self._numbers)}")


class BatchedTalk:
    """An agent's conversation as a Talk. It keeps the conversation's tokens, because the manager does not."""

    def __init__(self, manager: Any, name: Callable[[], str]) -> None:
        self._manager = manager
        self._name = name
        self._history: list[int] = []
        self._asked: str | None = None  # the request without an answer yet

    async def turn(self, tokens: Sequence[int], new: int) -> Answer:
        times: list[float] = []
        last: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            """Runs in the event loop for every token."""
            times.extend([time.perf_counter()] * (len(output.generated_tokens) - len(times)))
            if output.is_finished():
                last.set_result(output)

        request = self._name()
        self._history += tokens
        self._manager.register_result_handler(request, take)
        options = {"max_new_tokens": new, "streaming": True, "eos_token_id": -1}
        if self._manager.add_request(self._history, request_id=request, **options) is None:
            raise Refused("it takes no more requests")
        self._asked = request
        output = await last
        self._asked = None
        if output.error is not None:
            raise Refused(output.error)
        self._history += output.generated_tokens
        return Answer(times, None)

    def waiting(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        if self._asked is not None:
            self._manager.cancel_request(self._asked)


def measure(job: BatchingJob, stack: ExitStack) -> Batched:
    """Runs the job. The manager stays until the caller leaves the stack, which waits for the manager's requests."""
    model: Any = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=getattr(torch, job.dtype)).eval()
    model = model.to(job.device)
    offload_bytes = job.host_bytes if job.device != "cpu" else 0  # offloading needs pinned memory
    config = ContinuousBatchingConfig(cpu_offload_space=offload_bytes / GIB)
    page_size: Any = getattr(config, "page_size", None) or config.block_size  # up to 5.17: block_size
    config.num_blocks = max(1, job.kv_tokens // page_size)
    config.max_batch_tokens = BATCH_TOKENS
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    seeds = count()

    def drawn(tokens: int) -> list[int]:
        return prompt(tokens, model.config.vocab_size, next(seeds))

    def run(work: Work) -> Figures:
        return figures(work, asyncio.run(Run(work, Batching(manager), drawn)(job.run_s)))

    manager = stack.enter_context(
        model.continuous_batching_context_manager(generation_config=greedy, continuous_batching_config=config)
    )
    run(job.warm_up)
    runs = [run(work) for work in job.works]
    attention = model.config._attn_implementation
    return Batched(status=Status.MEASURED, attention=attention, offload_bytes=offload_bytes, runs=runs)


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BatchingJob)
    stack = ExitStack()
    try:
        found = measure(job, stack)
    except torch.OutOfMemoryError as error:
        found = Batched(status=Status.OUT_OF_MEMORY, note=str(error).split(" Of the allocated", 1)[0])
    Path(job.outcome).write_bytes(msgspec.json.encode(found))
    os._exit(0)  # requests that remain after a stopped run need no end


if __name__ == "__main__":
    main()
