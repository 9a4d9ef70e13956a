"""Changing an activation without djinnd: by a PyTorch hook in transformers' model, or by nnsight.

    python -m tools.bench.peers.whitebox JOB.json

It runs the job of whitebox_job.py. It writes its answer after the hooks and again after nnsight, so that a failure of
nnsight leaves the hooks' figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tools.bench.peers.nnsight import Traced
from tools.bench.peers.peer import blocks_of
from tools.bench.peers.whitebox_job import Answer, Edited, Job, Outcome
from tools.bench.stream.outcome import Status

Way = Callable[[Tensor, int], Tensor]  # (prompt, changed block) → the prompt with the tokens after it


class Model:
    """transformers' model and its job."""

    def __init__(self, job: Job) -> None:
        dtype = getattr(torch, job.dtype)
        self.job = job
        self.own: Any = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=dtype).eval().to(job.device)
        self.own.generation_config.eos_token_id = None  # the daemon's calls have ignore_eos
        self.prompts = [torch.tensor([prompt], device=job.device) for prompt in job.prompts]
        _, self._blocks = blocks_of(self.own)

    def options(self, ids: Tensor) -> dict[str, Any]:
        """Options of `generate`."""
        mask = torch.ones_like(ids)
        return {"attention_mask": mask, "max_new_tokens": self.job.tokens, "do_sample": False, "pad_token_id": 0}

    def plain(self, ids: Tensor) -> Tensor:
        found: Tensor = self.own.generate(ids, **self.options(ids))
        return found

    def hooked(self, ids: Tensor, blocks: int) -> Tensor:
        def once(_module: object, _args: object, output: Tensor) -> Tensor:
            handle.remove()  # the prompt has passed
            return output * self.job.scale

        handle = self._blocks[blocks - 1].register_forward_hook(once)
        return self.plain(ids)


def measured(model: Model, way: Way) -> Outcome:
    """The first run warms up and does not count."""
    way(model.prompts[0], model.job.blocks[0])
    return Outcome(status=Status.MEASURED, edited={blocks: _edited(model, way, blocks) for blocks in model.job.blocks})


def _edited(model: Model, way: Way, blocks: int) -> Edited:
    seconds, tokens = [], []
    for ids in model.prompts:
        began = time.perf_counter()
        tokens.append(_new(ids, way(ids, blocks)))  # reading the tokens waits for the device
        seconds.append(time.perf_counter() - began)
    return Edited(seconds=seconds, tokens=tokens)


def _new(ids: Tensor, whole: Tensor) -> list[int]:
    """The generated tokens."""
    found: list[int] = whole[0, ids.shape[1] :].tolist()
    return found


def by_hooks(model: Model) -> Answer:
    plain = [_new(ids, model.plain(ids)) for ids in model.prompts]
    return Answer(plain=plain, peers={"hooks": measured(model, model.hooked)})


def by_nnsight(model: Model) -> Outcome:
    job = model.job
    try:
        traced = Traced(model.own, Path(job.checkpoint))
    except ModuleNotFoundError as error:
        return Outcome(status=Status.SKIPPED, note=f"{error.name} is not installed")
    return measured(model, lambda ids, blocks: traced.generate(ids, blocks, job.scale, **model.options(ids)))


@torch.inference_mode()
def main(path: Path) -> None:
    job = msgspec.json.decode(path.read_bytes(), type=Job)
    model = Model(job)
    answer = by_hooks(model)
    Path(job.answer).write_bytes(msgspec.json.encode(answer))
    answer.peers["nnsight"] = by_nnsight(model)
    Path(job.answer).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
