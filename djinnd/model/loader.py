"""From a checkpoint folder to modules over device buffers.

    read     config, tensors' headers, the family's modules on meta, layouts      nothing large is touched
    admit    weights + the least KV must fit the budget                           or OutOfMemory with the figures
    fill     files → arena (skipped where an earlier engine has filled it)
    upload   arena → device buffers on the copy stream; modules are bound to them

Runs in a thread of its own: sessions of other models go on meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from djinn_client.errors import InvalidRequest, ModelRejected, OutOfMemory
from djinnd.device import Device
from djinnd.device.budget import gib
from djinnd.model.fused import fuse
from djinnd.model.recipes import RecipeBook
from djinnd.model.skeleton import Skeleton, bind, build, materialise_buffers, read_config
from djinnd.weights.checkpoint import Checkpoint
from djinnd.weights.store import Buffer, WeightStore

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all
Arena = Callable[[int, str], tuple[Tensor, bool]]  # bytes, fingerprint → uint8 [bytes], already filled

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Weights:
    """A loaded model's weights and the memory under them. `labels` name its reservations in the device's budget."""

    skeleton: Skeleton
    store: WeightStore
    host: Tensor
    dtype: torch.dtype
    parameters: int
    buffers: list[Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def release(self, device: Device) -> None:
        """The model's modules must not run any more. The arena is the server's to remove."""
        device.synchronize()
        device.unpin(self.store.pieces())
        self.buffers.clear()
        for label in self.labels:
            device.release(label)
        self.labels.clear()


class Loader:
    """Loads one model: `Loader(…)`, `admit`, `run`. What fails leaves nothing behind on the device."""

    def __init__(self, name: str, folder: Path, device: Device, dtype: str) -> None:
        """Raises ModelNotFound, ModelRejected, or InvalidRequest for a `dtype` that is none."""
        self.name = name
        self.device = device
        self.checkpoint = Checkpoint(folder)
        config = read_config(folder)
        _check_depth(config.num_hidden_layers, self.checkpoint)
        self.dtype = compute_dtype(dtype, self.checkpoint.dtype, device)
        model = build(config, self.dtype)
        recipes = RecipeBook(model, self.checkpoint)
        self.skeleton = Skeleton(model)
        recipes.require(self.skeleton.names, self.skeleton.tied)
        layouts = [(prefix, self.skeleton.block_layout(i)) for i, prefix in enumerate(self.skeleton.prefixes)]
        layouts.append(("", self.skeleton.rest_layout()))
        self.store = WeightStore(
            [Buffer(pre, lay, {name: recipes.recipe(pre + name) for name in lay.entries}) for pre, lay in layouts],
            self.checkpoint.dtype,
        )

    @property
    def device_bytes(self) -> int:
        return sum(buffer.layout.nbytes(self.dtype) for buffer in self.store.buffers)

    @property
    def fingerprint(self) -> str:
        layout = "".join(f"{b.name} {b.layout.numel};" for b in self.store.buffers)
        return hashlib.sha256(f"{self.checkpoint.fingerprint()} {layout}".encode()).hexdigest()

    def admit(self, more: int) -> None:
        """Raises OutOfMemory. `more`: bytes that the model needs on the device beside its weights, at the least."""
        need, free = self.device_bytes + more, self.device.budget.free
        if need > free:
            raise OutOfMemory(
                f"{self.name} needs {gib(need)} of device memory ({gib(self.device_bytes)} of weights as "
                f"{str(self.dtype).removeprefix('torch.')}, {gib(more)} for KV and workspace); {gib(free)} of the "
                f"budget of {gib(self.device.budget.total)} is free: unload a model or raise --memory",
                needed=need,
                free=free,
                budget=self.device.budget.total,
            )

    def run(self, arena: Arena, progress: Progress) -> Weights:
        """Raises ModelRejected or OutOfMemory, and what `arena` and `progress` raise."""
        host, filled = arena(self.store.nbytes, self.fingerprint)
        self.store.attach(host)
        if not filled:
            self.store.fill(lambda done, total: progress("reading", done, total))
        for buffer in self.store.buffers:
            buffer.recipes.clear()  # they hold the checkpoint's files open
        parameters = sum(e.numel for b in self.store.buffers for e in b.layout.entries.values())
        weights = Weights(self.skeleton, self.store, host, self.dtype, parameters)
        self.device.trim()  # of what models had that have gone
        self.device.pin(self.store.pieces())
        try:
            self._allocate(weights)
            self._upload(weights.buffers, progress)
            self._bind(weights.buffers)
        except BaseException:
            weights.release(self.device)
            raise
        return weights

    def _allocate(self, weights: Weights) -> None:
        for buffer in self.store.buffers:
            label = f"weights of {self.name}, {buffer.name or 'rest'}"
            weights.buffers.append(self.device.allocate(label, (buffer.layout.numel,), self.dtype))
            weights.labels.append(label)

    def _upload(self, buffers: list[Tensor], progress: Progress) -> None:
        events = [self.device.copy(buffer, self.store.host(index)) for index, buffer in enumerate(buffers)]
        done, total = 0, self.device_bytes
        for buffer, event in zip(buffers, events, strict=True):
            event.wait()
            done += buffer.nbytes
            progress("uploading", done, total)

    def _bind(self, buffers: list[Tensor]) -> None:
        skeleton = self.skeleton
        blocks = skeleton.adapter.blocks
        materialise_buffers(skeleton.model, blocks, self.device.torch_device)
        *block_buffers, rest = buffers
        for block, buffer, memory in zip(blocks, self.store.buffers[:-1], block_buffers, strict=True):
            bind(block, buffer.layout.views(memory))
            fuse(block, buffer.layout, memory)
        views = self.store.buffers[-1].layout.views(rest)
        for first, others in skeleton.tied.items():
            views |= dict.fromkeys(others, views[first])
        bind(skeleton.model, views)
        if self.device.torch_device.type == "cuda":
            from djinnd.model.fast_norm import replace_norms  # needs Triton, which comes with CUDA builds of torch

            for module in (skeleton.model, *blocks):
                replace_norms(module)


def _check_depth(blocks: int, checkpoint: Checkpoint) -> None:
    """Before any module is built, which takes time for each block: every block has tensors of its own."""
    if blocks > len(checkpoint.tensors):
        raise ModelRejected(
            f"{checkpoint.folder / 'config.json'} promises {blocks:,} blocks, the checkpoint has "
            f"{len(checkpoint.tensors):,} tensors in all",
            blocks=blocks,
            tensors=len(checkpoint.tensors),
        )


def compute_dtype(wanted: str, stored: torch.dtype, device: Device) -> torch.dtype:
    """`auto`: as in the checkpoint; on a CPU float32, where 16-bit products are slow or inexact."""
    if wanted == "auto":
        return torch.float32 if device.torch_device.type == "cpu" else stored
    if wanted not in DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
