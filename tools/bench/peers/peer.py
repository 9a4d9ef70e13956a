"""The common part of peers of the streaming bench: their job, their clock and their answer.

A peer is a file with a `build` that loads the checkpoint its own way and an `if __name__ == "__main__": serve(build)`.
It runs in a process of its own, so that a crash is a result and not the end of the bench:

    python -m tools.bench.peers.NAME JOB.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tools.bench.stream.outcome import Found, Job, Outcome, Status


class Offloaded(NamedTuple):
    model: Any  # has `generate`
    streamed_bytes: int  # weights that one forward pass brings to the device


class Generating:
    """transformers' greedy `generate`, timed with the device synchronized."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device

    def seconds(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Generates `new` tokens after each prompt, all in one batch, and returns the seconds."""
        ids = self._tensor(prompts)
        self._wait()
        began = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        self._wait()
        return time.perf_counter() - began

    def logits(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """The prompt's logits, float32 [tokens, vocab]."""
        with torch.inference_mode():
            logits = self._model(self._tensor([prompt]), use_cache=False).logits[0]
        found: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        return found

    def _tensor(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(prompt) for prompt in prompts], device=self._device)

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def measure(offloaded: Offloaded, job: Job) -> Found:
    """Measures the job; the first pass of each kind warms up. Writes the prompt's logits to the job's file."""
    generating = Generating(offloaded.model, job.device)
    generating.seconds([job.prompt], 2)
    first = [generating.seconds([job.prompt], 1) for _ in range(job.runs)]
    longer = [generating.seconds([job.prompt], job.tokens + 1) for _ in range(job.runs)]
    np.save(job.logits, generating.logits(job.prompt))
    return Found(
        first_token_s=first,
        step_s={1: [(seconds - statistics.median(first)) / job.tokens for seconds in longer]},
        streamed_bytes=offloaded.streamed_bytes,
    )


def serve(build: Callable[[Job], Offloaded]) -> None:
    """Runs a peer's process: reads the job that its argument names, and writes the outcome that the job names."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    if job.device != "cpu" and job.memory:
        total = torch.cuda.get_device_properties(job.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory / total))
    Path(job.outcome).write_bytes(msgspec.json.encode(_outcome(build, job)))


def _outcome(build: Callable[[Job], Offloaded], job: Job) -> Outcome:
    try:
        return Outcome(status=Status.MEASURED, found=measure(build(job), job))
    except torch.OutOfMemoryError as error:
        return Outcome(status=Status.OUT_OF_MEMORY, note=str(error).split(" Of the allocated", 1)[0])
    except ModuleNotFoundError as error:
        return Outcome(status=Status.SKIPPED, note=f"{error.name} is not installed")


# --- models -----------------------------------------------------------------------------------------------------------


def on_host(job: Job) -> Any:
    """Loads the checkpoint's model into host memory."""
    return AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=getattr(torch, job.dtype)).eval()


def skeleton(job: Job) -> Any:
    """The model without its weights."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(job.checkpoint)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))


def blocks_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The path of the model's list of blocks, and the list."""
    kinds = set(model._no_split_modules or ())
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in kinds:
            return name, module
    raise LookupError(f"{type(model).__name__} has no list of {sorted(kinds)}")


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())
