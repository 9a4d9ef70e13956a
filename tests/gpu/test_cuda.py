from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinnd.device import open_device
from djinnd.device.cuda import CudaDevice
from tests.support.cuda import CUDA_MEMORY, cuda_device

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with cuda_device() as device:
        yield device


def host_memory(nbytes: int) -> Tensor:
    """Host memory that starts on a page, like an arena."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def test_auto_is_the_gpu() -> None:
    device = open_device("auto", CUDA_MEMORY)
    assert isinstance(device, CudaDevice) and device.name == "cuda:0"
    device.close()
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cuda:99 is not there"):
        CudaDevice("cuda:99", 0)
    with pytest.raises(OutOfMemory, match="is more than the"):
        CudaDevice("cuda:0", 1 << 50)


def test_the_allocator_keeps_to_the_budget(device: CudaDevice) -> None:
    with pytest.raises(OutOfMemory, match="too much needs"):
        device.allocate("too much", (CUDA_MEMORY,), torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(CUDA_MEMORY + (2 << 20), dtype=torch.uint8, device=device.torch_device)


def test_trim_gives_free_memory_back(device: CudaDevice) -> None:
    device.trim()
    before = torch.cuda.memory_reserved()
    device.allocate("scraps", (1 << 28,), torch.uint8)
    device.release("scraps")
    assert torch.cuda.memory_reserved() >= before + (1 << 28)
    device.trim()
    assert torch.cuda.memory_reserved() == before


def test_zeroed_memory_is_visible_to_every_stream(device: CudaDevice) -> None:
    device.allocate("scraps", (1 << 30,), torch.uint8).fill_(7)
    device.release("scraps")
    zeros = device.allocate("zeros", (1 << 30,), torch.uint8, zero=True)
    with device.computing():
        assert not bool(zeros.any())
    device.release("zeros")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copies_go_both_ways_in_order_and_convert(device: CudaDevice, dtype: torch.dtype) -> None:
    source = torch.arange(1 << 20, dtype=torch.float32).remainder(256).to(dtype)
    there = device.allocate("there", (1 << 20,), torch.float32)
    device.copy(there, source).order()
    with device.computing():
        there.mul_(2)
    device.synchronize()
    back = torch.zeros(1 << 20)
    device.copy(back, there).wait()
    assert torch.equal(back, source.float() * 2)


def test_unpinned_pieces_can_be_pinned_again(device: CudaDevice) -> None:
    pieces = list(host_memory(64 * mmap.PAGESIZE).split(16 * mmap.PAGESIZE))
    for _ in range(2):
        device.pin(pieces)
        assert all(piece.is_pinned() for piece in pieces)
        device.unpin(pieces)
        assert not any(piece.is_pinned() for piece in pieces)


def test_if_one_piece_cannot_be_pinned_none_is(device: CudaDevice) -> None:
    pieces = [host_memory(16 * mmap.PAGESIZE) for _ in range(4)]  # torch asks the driver about the whole mapping
    device.pin([pieces[2]])  # the driver refuses to do it twice
    with pytest.raises(OutOfMemory, match="host memory cannot be pinned"):
        device.pin(pieces)
    assert [piece.is_pinned() for piece in pieces] == [False, False, True, False]
    device.unpin([pieces[2]])
    assert bool((torch.ones(4, device=device.torch_device) == 1).all())  # the failure left no CUDA error behind
    device.pin(pieces)
    device.unpin(pieces)
