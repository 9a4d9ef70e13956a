from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinnd.weights.layout import Layout
from djinnd.weights.store import PAGE, READERS, Buffer, WeightStore


def constant(value: float, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.full(shape, value)


def store_of(count: int, dtype: torch.dtype = torch.bfloat16) -> WeightStore:
    """Buffer i holds a = i and b = -i."""
    shapes = {"a": (5, 300), "b": (7,)}
    buffers = [
        Buffer(f"block{i}.", Layout(shapes.items()), {"a": constant(i, shapes["a"]), "b": constant(-i, shapes["b"])})
        for i in range(count)
    ]
    return WeightStore(buffers, dtype)


def attached(store: WeightStore) -> WeightStore:
    store.attach(torch.zeros(store.nbytes, dtype=torch.uint8))
    return store


def test_every_buffer_starts_on_a_page_of_the_host() -> None:
    store = attached(store_of(3))
    assert all(offset % PAGE == 0 for offset in store.offsets) and store.nbytes % PAGE == 0
    pieces = store.pieces()
    assert [piece.numel() % PAGE for piece in pieces] == [0, 0, 0]
    assert torch.cat(pieces).numel() == store.nbytes
    for index, piece in enumerate(pieces):
        assert piece.data_ptr() == store.host(index).data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fill_puts_every_tensor_in_its_place_in_the_checkpoint_s_dtype(dtype: torch.dtype) -> None:
    store = attached(store_of(9, dtype))
    store.fill(lambda done, total: None)
    for index, buffer in enumerate(store.buffers):
        host = store.host(index)
        assert host.dtype == dtype and host.numel() == buffer.layout.numel
        views = buffer.layout.views(host)
        assert bool((views["a"] == index).all()) and bool((views["b"] == -index).all())


def test_progress_rises_to_the_whole() -> None:
    store = attached(store_of(5))
    told: list[tuple[int, int]] = []
    store.fill(lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [store.nbytes] * 5
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == store.nbytes


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    store = attached(store_of(2))
    store.buffers[1].recipes["a"] = constant(0, (300, 5))
    with pytest.raises(ModelRejected, match=r"block1\.a has shape \[300, 5\] in the checkpoint.*\[5, 300\]") as told:
        store.fill(lambda done, total: None)
    assert told.value.data["tensor"] == "block1.a"


def test_after_a_failure_nobody_reads_on() -> None:
    store = attached(store_of(READERS + 8))

    def fails() -> Tensor:
        raise ModelRejected("broken")

    store.buffers[1].recipes["b"] = fails
    with pytest.raises(ModelRejected, match="broken"):
        store.fill(lambda done, total: None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("djinn-read")]


def test_what_progress_raises_ends_the_reading() -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        attached(store_of(3)).fill(progress)


def test_memory_of_another_size_is_our_fault() -> None:
    store = store_of(1)
    with pytest.raises(AssertionError):
        store.attach(torch.zeros(store.nbytes - PAGE, dtype=torch.uint8))
