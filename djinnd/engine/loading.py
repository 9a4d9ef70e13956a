"""Loads models one after another, beside the step loop.

    engine thread:  submit ─────────────────────────────────────────────► adopt: KV pool, check, graphs → Loaded
    loader thread:     read ─ NeedArena ─ wait ─ fill ─ pin ─ upload ─┘
                                     ▲
    engine thread:          arena_ready / arena_refused (from the server)

A load that is under way when the engine ends is broken off at the next buffer.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import posix_ipc
import torch
from torch import Tensor

from djinn_client.errors import DjinnError, OutOfMemory
from djinnd.device import Device
from djinnd.engine.channel import Channel, ServerGone
from djinnd.engine.memory import ModelShape, least_bytes
from djinnd.messages import ArenaFilled, ArenaReady, ArenaRefused, Load, Loading, NeedArena
from djinnd.model.loader import Loader, Weights

log = logging.getLogger("djinnd.engine")


@dataclass(frozen=True, slots=True)
class LoadResult:
    load: Load
    weights: Weights | None
    shape: ModelShape | None
    error: DjinnError | None


class _Closing(Exception):
    """The engine ends: nobody wants this model any more."""


class LoadQueue:
    """Owns the loader thread. `results` are for the engine's thread, which is woken when there is one."""

    def __init__(self, channel: Channel, device: Device, max_batch_tokens: int) -> None:
        self._channel = channel
        self._device = device
        self._max_batch_tokens = max_batch_tokens
        self._closing = False
        self._jobs: queue.SimpleQueue[Load | None] = queue.SimpleQueue()  # None: there will be no more
        self._arenas: queue.SimpleQueue[ArenaReady | ArenaRefused | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="djinn-load", daemon=True)
        self._thread.start()

    def submit(self, load: Load) -> None:
        self._jobs.put(load)

    def arena(self, answer: ArenaReady | ArenaRefused) -> None:
        self._arenas.put(answer)

    def _work(self) -> None:
        """Keeps no result: its memory must go with the model."""
        while (load := self._jobs.get()) is not None:
            try:
                self.results.put(self._load(load))
            except (_Closing, ServerGone):
                return
            except DjinnError as error:
                self.results.put(LoadResult(load, None, None, error))
            except torch.OutOfMemoryError as error:
                self.results.put(LoadResult(load, None, None, OutOfMemory(f"loading {load.model}: {error}")))
            except Exception as error:
                log.exception("load_failed model=%s", load.model)
                told = DjinnError(f"loading {load.model} failed: {error!r}")
                self.results.put(LoadResult(load, None, None, told))
            self._channel.wake()

    def _load(self, load: Load) -> LoadResult:
        def progress(stage: str, done: int, total: int) -> None:
            if self._closing:
                raise _Closing
            self._channel.send(Loading(load.model, stage, done, total))

        progress("opening", 0, 0)
        loader = Loader(load.model, Path(load.path), self._device, load.dtype)
        shape = model_shape(loader)
        loader.admit(least_bytes(shape, self._max_batch_tokens))
        weights = loader.run(lambda nbytes, fingerprint: self._open_arena(load, nbytes, fingerprint), progress)
        self._channel.send(ArenaFilled(load.model))
        return LoadResult(load, weights, shape, None)

    def _open_arena(self, load: Load, nbytes: int, fingerprint: str) -> tuple[Tensor, bool]:
        self._channel.send(NeedArena(load.request, load.model, nbytes, fingerprint))
        answer = self._arenas.get()
        if answer is None:
            raise _Closing
        assert answer.request == load.request, (answer, load.request)
        if isinstance(answer, ArenaRefused):
            raise OutOfMemory(answer.message, **answer.data)
        return map_arena(answer, nbytes), answer.complete

    def close(self) -> None:
        """Returns when the thread has ended; a load that was under way is broken off."""
        self._closing = True
        self._arenas.put(None)
        self._jobs.put(None)
        self._thread.join()


def map_arena(answer: ArenaReady, nbytes: int) -> Tensor:
    """The model's stretch of shared memory as uint8 [nbytes]. The mapping lives as long as the tensor."""
    memory = posix_ipc.SharedMemory(answer.name)
    try:
        assert memory.size >= answer.offset + nbytes, (memory.size, answer.offset, nbytes)
        mapping = mmap.mmap(memory.fd, answer.offset + nbytes)
    finally:
        memory.close_fd()
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=answer.offset, count=nbytes)


def model_shape(loader: Loader) -> ModelShape:
    skeleton = loader.skeleton
    config = skeleton.config
    blocks = [skeleton.block_layout(index) for index in range(skeleton.num_blocks)]
    projections = [entry.shape for block in blocks for entry in block.entries.values() if len(entry.shape) > 1]
    return ModelShape(
        num_blocks=skeleton.num_blocks,
        kv_heads=skeleton.kv_shape.kv_heads,
        head_dim=skeleton.kv_shape.head_dim,
        width=config.hidden_size,
        widest=max(max(shape[-2:]) for shape in projections),  # rows and columns: GPT-2's lie transposed
        vocab=config.vocab_size,
        itemsize=loader.dtype.itemsize,
        max_positions=config.max_position_embeddings,
    )
