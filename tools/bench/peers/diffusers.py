"""diffusers' group offload, block by block with streams: the next block is fetched while one computes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tools.bench.peers.peer import Offloaded, blocks_of, on_host, serve, weight_bytes
from tools.bench.stream.outcome import Job


def build(job: Job) -> Offloaded:
    hooks: Any = importlib.import_module("diffusers.hooks")
    model = on_host(job)
    at, blocks = blocks_of(model)
    above, _, name = at.rpartition(".")
    decoder = model.get_submodule(above)
    stay, leave = nn.ModuleList(blocks[: job.resident]), nn.ModuleList(blocks[job.resident :])
    with children(decoder, {**dict(decoder.named_children()), name: stay}):
        model.to(job.device)
    # A block waits for its copies and fetches the next block only if diffusers has hooked the module whose forward runs
    # the blocks. It hooks that module only if the module has something of its own to offload.
    decoder.register_buffer("offloaded_too", torch.zeros(1), persistent=False)
    with children(decoder, {name: leave}):
        hooks.apply_group_offloading(
            decoder,
            onload_device=torch.device(job.device),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            non_blocking=True,
            use_stream=True,
        )
    return Offloaded(model, weight_bytes(leave))


@contextmanager
def children(module: nn.Module, shown: Mapping[str, nn.Module | None]) -> Iterator[None]:
    """Gives the module these children, and no others, as long as the context lasts."""
    whole = dict(module._modules)
    _replace(module, shown)
    try:
        yield
    finally:
        _replace(module, whole)


def _replace(module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    module._modules.clear()
    module._modules.update(children)


if __name__ == "__main__":
    serve(build)
