from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinn_client.handover.packed import Unpackable
from djinnd.device.cpu import CpuDevice
from djinnd.weights.filling import READERS, Packer, fill
from djinnd.weights.layout import Layout
from djinnd.weights.store import Buffer, WeightStore

QKV = {f"{name}_proj.weight": (rows, 48) for name, rows in (("q", 16), ("k", 7), ("v", 7))}
SHAPES: dict[str, tuple[int, ...]] = {**QKV, "o_proj.weight": (48, 30), "norm.weight": (48,), "o_proj.bias": (48,)}

Source = Callable[[int, str], Tensor]


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 20)
    yield device
    assert device.budget.used == 0
    device.close()


def weights(index: int, name: str) -> Tensor:
    """Weights of a model: normal numbers, with a few unusual ones."""
    generator = torch.Generator().manual_seed(index * 100 + list(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator) / 8
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-30, 3e38])
    return values.to(torch.bfloat16)


def store_of(count: int, dtype: torch.dtype = torch.bfloat16, *, packed: bool, source: Source = weights) -> WeightStore:
    """A store of `count` buffers; the last one is the rest."""
    buffers = [
        Buffer(
            f"block{i}." if i < count - 1 else "",
            Layout(SHAPES.items()),
            {name: (lambda view, i=i, name=name: view.copy_(source(i, name))) for name in SHAPES},
        )
        for i in range(count)
    ]
    store = WeightStore(buffers, dtype, packed=packed)
    store.attach(torch.zeros(store.nbytes, dtype=torch.uint8))
    return store


def quiet(done: int, total: int) -> None:
    pass


def plain_of(store: WeightStore, index: int) -> Tensor:
    """A buffer in plain form, unpacked if it is packed."""
    form, host = store.forms[index], store.host(index)
    if form is None:
        return host
    out = torch.empty(form.numel, dtype=torch.bfloat16)
    padded = torch.zeros(form.nbytes, dtype=torch.uint8)
    padded[: len(store.travelling(index))] = store.travelling(index)
    form.unpack(padded, out)
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_every_tensor_equals_the_checkpoint_to_the_bit(device: CpuDevice, packed: bool) -> None:
    store = store_of(9, packed=packed)
    fill(store, device, quiet)
    for index, buffer in enumerate(store.buffers):
        views = buffer.layout.views(plain_of(store, index))
        for name in SHAPES:
            assert same_bits(views[name], weights(index, name)), (index, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_stay_plain(device: CpuDevice, dtype: torch.dtype) -> None:
    store = store_of(3, dtype, packed=False)
    fill(store, device, quiet)
    for index, buffer in enumerate(store.buffers):
        for name, view in buffer.layout.views(store.host(index)).items():
            assert same_bits(view, weights(index, name).to(dtype))


def test_a_packed_store_is_smaller_and_equal_blocks_have_equal_bytes(device: CpuDevice) -> None:
    shapes = {"weight": (512, 512), "norm": (512,)}
    values = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    buffers = [
        Buffer(f"{i}", Layout(shapes.items()), {n: lambda view, n=n: view.copy_(values[n]) for n in shapes})
        for i in range(3)
    ]
    plain, packed = (WeightStore(buffers, torch.bfloat16, packed=packing) for packing in (False, True))
    assert packed.extents[0] < 0.78 * plain.extents[0] and packed.extents[2] == plain.extents[2]
    packed.attach(torch.randint(0, 255, (packed.nbytes,), dtype=torch.uint8))  # leftovers of other data
    fill(packed, device, quiet)
    assert same_bits(packed.travelling(0), packed.travelling(1))


@pytest.mark.parametrize("packed", [False, True])
def test_progress_rises_to_the_whole(device: CpuDevice, packed: bool) -> None:
    store = store_of(5, packed=packed)
    told: list[tuple[int, int]] = []
    fill(store, device, lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [store.nbytes] * 5
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == store.nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_after_a_failure_no_other_read_begins(device: CpuDevice, packed: bool) -> None:
    read: list[tuple[int, str]] = []

    def source(index: int, name: str) -> Tensor:
        read.append((index, name))
        if (index, name) == (1, "norm.weight"):
            raise ModelRejected("broken")
        return weights(index, name)

    with pytest.raises(ModelRejected, match="broken"):
        fill(store_of(READERS + 20, packed=packed, source=source), device, quiet)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("djinn-read")]
    assert max(index for index, _ in read) < READERS + 10


@pytest.mark.parametrize("packed", [False, True])
def test_an_exception_of_progress_ends_the_filling(device: CpuDevice, packed: bool) -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        fill(store_of(5, packed=packed), device, progress)


@pytest.mark.parametrize("value", [0.0, 1e-40, float("inf")])
def test_weights_that_cannot_be_packed_raise_unpackable(device: CpuDevice, value: float) -> None:
    def source(index: int, name: str) -> Tensor:
        return torch.full(SHAPES[name], value) if index == 2 else weights(index, name)

    with pytest.raises(Unpackable, match=r"[\d,]+ of [\d,]+ weights lie outside"):
        fill(store_of(5, packed=True, source=source), device, quiet)


class Roomy(CpuDevice):
    """Claims not to be a CPU, so that blocks are packed in its memory, within the budget."""

    class _Elsewhere:
        type = "elsewhere"

    def allocate(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        here, self.torch_device = self.torch_device, torch.device("cpu")
        try:
            return super().allocate(label, shape, dtype, zero=zero)
        finally:
            self.torch_device = here


@pytest.mark.parametrize("memory", [1 << 20, 100])
def test_packing_on_the_device_and_on_the_host_gives_the_same_bytes(memory: int) -> None:
    elsewhere = Roomy(memory)
    elsewhere.torch_device = Roomy._Elsewhere()  # type: ignore[assignment]
    here = CpuDevice(1 << 20)
    stores = [store_of(5, packed=True) for _ in range(2)]
    most = []

    def progress(done: int, total: int) -> None:
        most.append(elsewhere.budget.used)

    fill(stores[0], elsewhere, progress)
    fill(stores[1], here, quiet)
    assert (max(most) > 0) == (memory > 100) and elsewhere.budget.used == 0
    for index in range(5):
        assert same_bits(stores[0].travelling(index), stores[1].travelling(index))
    elsewhere.torch_device = torch.device("cpu")
    elsewhere.close()
    here.close()


def test_two_packers_may_live_at_once(device: CpuDevice) -> None:
    store = store_of(3, packed=True)
    first, second = Packer(store, device), Packer(store, device)
    assert first.staging(0).data_ptr() != second.staging(0).data_ptr() != first.staging(1).data_ptr()
    first.close()
    second.close()
