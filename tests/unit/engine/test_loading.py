from __future__ import annotations

import mmap
import os
import socket
import uuid
from collections.abc import Iterator

import posix_ipc
import pytest
import torch

from djinn_client.errors import DjinnError, OutOfMemory
from djinnd.device.cpu import CpuDevice
from djinnd.engine.channel import Channel
from djinnd.engine.loading import LoadQueue, map_arena, model_shape
from djinnd.messages import ArenaReady, Load
from djinnd.model.loader import Loader
from tests.support.engine_thread import FOREVER
from tests.support.loaded import MEMORY
from tests.support.models import reduced_model


@pytest.fixture
def arena() -> Iterator[posix_ipc.SharedMemory]:
    arena = posix_ipc.SharedMemory(f"/djinnd-test-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=4 * mmap.PAGESIZE)
    yield arena
    arena.close_fd()
    arena.unlink()


def test_the_arena_is_mapped_behind_its_header(arena: posix_ipc.SharedMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensor = map_arena(ArenaReady(1, arena.name, mmap.PAGESIZE, complete=False), 2 * mmap.PAGESIZE)
    assert (tensor.dtype, tensor.numel(), tensor.data_ptr() % mmap.PAGESIZE) == (torch.uint8, 2 * mmap.PAGESIZE, 0)
    tensor.fill_(7)
    with mmap.mmap(arena.fd, arena.size) as seen:
        assert seen[:] == bytes(mmap.PAGESIZE) + b"\x07" * 2 * mmap.PAGESIZE + bytes(mmap.PAGESIZE)
    del tensor
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_arena_that_is_too_small_is_seen_before_it_is_touched(arena: posix_ipc.SharedMemory) -> None:
    with pytest.raises(AssertionError):
        map_arena(ArenaReady(1, arena.name, mmap.PAGESIZE, complete=False), 4 * mmap.PAGESIZE)


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "widest", "max_positions"),
    [
        ("llama-2", 4, 16, 160, 2048),
        ("qwen3", 2, 32, 160, 2048),
        ("gpt2", 4, 16, 256, 1024),
        ("gpt-j", 4, 16, 256, 2048),
        ("mixtral", 2, 16, 192, 2048),
    ],
)
def test_the_figures_of_a_family(family: str, kv_heads: int, head_dim: int, widest: int, max_positions: int) -> None:
    device = CpuDevice(MEMORY)
    shape = model_shape(Loader("m", reduced_model(family), device, "float16"))
    assert (shape.num_blocks, shape.width, shape.vocab, shape.itemsize) == (4, 64, 512, 2)
    assert (shape.kv_heads, shape.head_dim, shape.max_positions) == (kv_heads, head_dim, max_positions)
    assert shape.widest == widest
    device.close()


class Queue:
    """A load queue whose engine is the test."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.device = CpuDevice(MEMORY)
        self.channel = Channel(ours.detach())
        self.loads = LoadQueue(self.channel, self.device, max_batch_tokens=64)

    def error_of(self, load: Load) -> DjinnError:
        self.loads.submit(load)
        self.channel.receive(FOREVER)  # woken
        result = self.loads.results.get(timeout=FOREVER)
        assert result.load is load and result.weights is None and result.error is not None
        return result.error

    def close(self) -> None:
        self.loads.close()
        self.channel.close()
        self.server.close()
        self.device.close()


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def load() -> Load:
    return Load(1, "m", str(reduced_model("llama-2")))


def test_a_failure_that_nobody_foresaw_is_told_and_the_next_load_is_served(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr("djinnd.engine.loading.model_shape", fails)
    for _ in range(2):
        error = queue.error_of(load())
        assert type(error) is DjinnError and "ZeroDivisionError('nobody foresaw this')" in error.message
    assert queue.device.budget.used == 0


def test_a_device_without_memory_is_told_as_such(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("2.00 GiB more")

    monkeypatch.setattr("djinnd.engine.loading.model_shape", fails)
    error = queue.error_of(load())
    assert isinstance(error, OutOfMemory) and "loading m: 2.00 GiB more" in error.message
