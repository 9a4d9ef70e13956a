"""Accelerate's offload by `device_map`: the other blocks come to the device when their turn is."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tools.bench.peers.peer import Offloaded, blocks_of, serve, skeleton, weight_bytes
from tools.bench.stream.outcome import Job


def build(job: Job) -> Offloaded:
    empty = skeleton(job)
    _, blocks = blocks_of(empty)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.checkpoint,
        dtype=getattr(torch, job.dtype),
        device_map=device_map(empty, job.resident, job.device),
    )
    return Offloaded(model.eval(), weight_bytes(blocks[job.resident :]))


def device_map(model: Any, resident: int, device: str) -> dict[str, str]:
    """Places the first `resident` blocks and all modules outside of blocks on `device`, and the other blocks on
    "cpu"."""
    at, blocks = blocks_of(model)
    places: dict[str, str] = {}

    def place(prefix: str, module: Any) -> None:
        for name, child in module.named_children():
            path = prefix + name
            if path == at:
                places.update({f"{path}.{i}": device if i < resident else "cpu" for i in range(len(blocks))})
            elif at.startswith(f"{path}."):
                place(f"{path}.", child)
            else:
                places[path] = device

    place("", model)
    return places


if __name__ == "__main__":
    serve(build)
