"""The same work in transformers itself: one process, `generate`, SDPA attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RUNS = 5


def measure(
    checkpoint: Path,
    dtype: str,
    logits: npt.NDArray[np.float32],
    prompt: Callable[[int, int, int], list[int]],
    work: dict[str, Any],
) -> dict[str, Any]:
    """First token and step in milliseconds, as decode.py defines them; how far `logits`, those of prompt 0, are from
    transformers' (‖a - b‖ / ‖b‖), and transformers' eager attention from its SDPA; the device's memory rate."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    model = model.to(device)
    vocab = model.config.vocab_size
    context, tokens = work["context"], work["tokens"]

    def run(batch: int, new: int) -> float:
        ids = torch.tensor([prompt(context, vocab, seed) for seed in range(batch)], device=device)
        _wait(device)
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        _wait(device)
        return time.perf_counter() - began

    run(1, 2)
    first = statistics.median(run(1, 1) for _ in range(RUNS))
    steps = {}
    for batch in work["sessions"]:
        short = statistics.median(run(batch, 1) for _ in range(3))
        steps[batch] = (min(run(batch, tokens) for _ in range(2)) - short) / (tokens - 1) * 1e3
    ids = torch.tensor([prompt(context, vocab, 0)], device=device)
    with torch.inference_mode():
        wanted = model(ids).logits[0].float().cpu().numpy()
        model.set_attn_implementation("eager")
        eager = model(ids).logits[0].float().cpu().numpy()
    return {
        "first_token_ms": first * 1e3,
        "step_ms": steps,
        "logit_error": _distance(logits, wanted),
        "own_logit_error": _distance(eager, wanted),
        "memory_rate": _memory_rate() if device == "cuda" else None,
    }


def _distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _memory_rate() -> float:
    """Bytes a second of a device-to-device copy of 4 GiB, read and written."""
    import torch

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(6):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(2 * source.numel() / statistics.median(times[1:]))
