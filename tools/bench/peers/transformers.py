"""transformers by itself, with all weights resident: one process, `generate`, SDPA attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from tools.bench.harness import bus
from tools.bench.peers.peer import Generating, Offloaded, on_host, serve
from tools.bench.stream.outcome import Job

RUNS = 5


def measure(
    checkpoint: Path,
    dtype: str,
    logits: npt.NDArray[np.float32],
    prompt: Callable[[int, int, int], list[int]],
    work: dict[str, Any],
) -> dict[str, Any]:
    """First token and step in milliseconds, as serving/decode.py defines them, and the device's memory rate. Also two
    distances (‖a - b‖ / ‖b‖): of `logits`, which belong to prompt 0, and of eager attention, from SDPA's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    model = model.to(device)
    generating = Generating(model, device)
    context, tokens = work["context"], work["tokens"]

    def run(batch: int, new: int) -> float:
        return generating.seconds([prompt(context, model.config.vocab_size, seed) for seed in range(batch)], new)

    run(1, 2)
    first = statistics.median(run(1, 1) for _ in range(RUNS))
    steps = {}
    for batch in work["sessions"]:
        short = statistics.median(run(batch, 1) for _ in range(3))
        steps[batch] = (min(run(batch, tokens) for _ in range(2)) - short) / (tokens - 1) * 1e3
    wanted = generating.logits(prompt(context, model.config.vocab_size, 0))
    model.set_attn_implementation("eager")
    eager = generating.logits(prompt(context, model.config.vocab_size, 0))
    return {
        "first_token_ms": first * 1e3,
        "step_ms": steps,
        "logit_error": _distance(logits, wanted),
        "own_logit_error": _distance(eager, wanted),
        "memory_rate": bus.memory_rate(device) if device == "cuda" else None,
    }


def build(job: Job) -> Offloaded:
    return Offloaded(on_host(job).to(job.device), 0)


def _distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


if __name__ == "__main__":
    serve(build)
