"""DeepSpeed's ZeRO-Inference: stage 3 with parameters in pinned host memory, fetched ahead of their use.

As in its documentation, only the smallest parameters stay on the device. With `persistent` as a second argument,
`python -m tools.bench.peers.deepspeed JOB.json persistent` keeps as many elements there as the job's resident blocks
and all modules outside of blocks have.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any

import torch

from tools.bench.peers.peer import Offloaded, blocks_of, on_host, serve, weight_bytes
from tools.bench.stream.outcome import Job

SMALL = 10_000  # elements: norms and biases, which ZeRO-Inference keeps on the device


def build(job: Job) -> Offloaded:
    deepspeed: Any = importlib.import_module("deepspeed")
    _be_alone()
    model = on_host(job)
    _, blocks = blocks_of(model)
    largest = sum(parameter.numel() for parameter in blocks[0].parameters())
    stays = _elements(model) - sum(_elements(block) for block in blocks[job.resident :])
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": 3 * largest,
        "stage3_max_reuse_distance": 3 * largest,
        "stage3_param_persistence_threshold": SMALL,
    }
    persistent = sys.argv[2:] == ["persistent"]
    if persistent:
        zero |= {"stage3_param_persistence_threshold": _elements(model), "stage3_model_persistence_threshold": stays}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "fp16": {"enabled": job.dtype == "float16"},
        "zero_optimization": zero,
    }
    streamed = weight_bytes(blocks[job.resident :]) if persistent else weight_bytes([model])
    engine = deepspeed.initialize(model=model, config=config)[0]
    return Offloaded(engine.module.eval(), streamed)


def _elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _be_alone() -> None:
    """Sets the environment of a world of one process, which DeepSpeed asks for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})


if __name__ == "__main__":
    serve(build)
