from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.device.cpu import CpuDevice
from djinnd.engine.memory import host_pages
from djinnd.engine.memory.host_pages import HostPages, object_bytes, pages_fingerprint, slots_in
from djinnd.engine.memory.memory import ModelShape
from djinnd.kvcache.tier import HOST_PAGE, Tier
from tests.support.loaded import MEMORY
from tests.support.pinned import pinned

PAGE = 3 * HOST_PAGE - 512  # bytes: not a multiple of a host page
SLOT = 3 * HOST_PAGE
KEY = b"k" * 16


class Device(CpuDevice):
    """Records pinned memory."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.pinned: list[tuple[int, int]] = []  # address, bytes

    def pin(self, pieces: Sequence[Tensor], *, read_only: bool = False) -> None:
        self.pinned += [(piece.data_ptr(), piece.nbytes) for piece in pieces]

    def unpin(self, pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            self.pinned.remove((piece.data_ptr(), piece.nbytes))


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def shared(slots: int) -> Tensor:
    """Shared memory aligned to a host page, as mapped memory is."""
    nbytes = object_bytes(slots, PAGE)
    memory = torch.zeros(nbytes + HOST_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HOST_PAGE
    return memory[start : start + nbytes]


def test_table_and_slots_are_contiguous_and_aligned_to_host_pages(device: Device) -> None:
    memory = shared(70)
    pages = HostPages(memory, PAGE, device)
    assert (pages.capacity, pages.nbytes) == (70, memory.numel())
    table_bytes = Tier.table_bytes(70)
    assert pages.table.nbytes == table_bytes and not pages.table.readonly
    pages.table[3] = 7
    assert memory[3] == 7
    for index in range(70):
        slot = pages.slot(index)
        assert (slot.dtype, slot.shape, slot.is_contiguous()) == (torch.uint8, (PAGE,), True)
        assert slot.data_ptr() - memory.data_ptr() == table_bytes + index * SLOT
        assert slot.data_ptr() % HOST_PAGE == 0
        slot.fill_(index + 1)
    filled = memory[table_bytes:].view(70, SLOT)
    assert torch.equal(filled[:, :PAGE].amin(1), torch.arange(1, 71, dtype=torch.uint8))
    assert not filled[:, PAGE:].any()


def test_the_next_engine_finds_the_table_that_a_tier_wrote(device: Device) -> None:
    memory = shared(5)
    pages = HostPages(memory, PAGE, device)
    tier = Tier(pages.table, pages.capacity)
    slot = tier.prepare(KEY)
    assert slot is not None
    pages.slot(slot).fill_(9)
    tier.complete(slot, checksum=11)
    pages.release()
    later = HostPages(memory, PAGE, device)
    found = Tier(later.table, later.capacity).find(KEY)
    assert found == slot and later.slot(found).eq(9).all()


@pytest.mark.parametrize(("slots_a_piece", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_all_slots_are_pinned_in_pieces_that_cut_no_slot(
    device: Device, monkeypatch: pytest.MonkeyPatch, slots_a_piece: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(host_pages, "PINNED_PIECE", slots_a_piece * SLOT + SLOT // 2)
    pages = pinned(HostPages(shared(7), PAGE, device))
    first = pages.slot(0).data_ptr()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    assert device.pinned == [(first + s * SLOT, n * SLOT) for s, n in zip(starts, sizes, strict=True)]
    assert all(address % HOST_PAGE == 0 for address, _ in device.pinned)
    assert pages.piece_slots == slots_a_piece
    pages.release()
    assert device.pinned == []


def test_a_slot_larger_than_a_piece_is_a_piece(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PINNED_PIECE", HOST_PAGE)
    pages = pinned(HostPages(shared(2), PAGE, device))
    assert [nbytes for _, nbytes in device.pinned] == [SLOT, SLOT]
    pages.release()


def test_memory_that_cannot_be_pinned_is_used_unpinned(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(pieces: Sequence[Tensor]) -> None:
        raise OutOfMemory("64 MiB of host memory cannot be pinned")

    monkeypatch.setattr(device, "pin", refuses)
    pages = pinned(HostPages(shared(2), PAGE, device))
    assert pages.failure is not None and "cannot be pinned" in pages.failure.message
    assert pages.is_ready(0) and pages.is_ready(1)
    assert [*pages.take_ready()] == [range(2)]
    pages.release()
    assert device.pinned == []


def test_a_wanted_slot_s_piece_is_pinned_next(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PINNED_PIECE", 2 * SLOT)
    may_pin, order = threading.Event(), list[int]()

    def pin(pieces: Sequence[Tensor]) -> None:
        order.append(pieces[0].data_ptr())
        may_pin.wait(60)

    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "unpin", lambda pieces: None)
    pages = HostPages(shared(8), PAGE, device)
    while not order:
        time.sleep(0.001)
    assert not pages.is_ready(5) and not pages.is_ready(4)
    may_pin.set()
    pinned(pages)
    assert order == [pages.slot(slot).data_ptr() for slot in (0, 4, 2, 6)]
    assert [*pages.take_ready()] == [range(slot, slot + 2) for slot in (0, 4, 2, 6)]
    assert not [*pages.take_ready()], "each is told once"
    assert all(pages.is_ready(slot) for slot in range(8))
    pages.release()


@pytest.mark.parametrize(("idle_s", "rests"), [(0.0, True), (0.9, True), (1.1, False), (math.inf, False)])
def test_pinning_rests_while_steps_run_and_for_a_second_afterwards(
    device: Device, monkeypatch: pytest.MonkeyPatch, idle_s: float, rests: bool
) -> None:
    at: list[float] = []

    def pin(pieces: Sequence[Tensor]) -> None:
        at.append(time.monotonic())
        time.sleep(0.01)

    monkeypatch.setattr(host_pages, "PINNED_PIECE", SLOT)
    monkeypatch.setattr(host_pages, "PIN_REST", 10 if rests else 1e6)
    monkeypatch.setattr(Device, "idle_s", idle_s)
    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "unpin", lambda pieces: None)
    pages = pinned(HostPages(shared(3), PAGE, device))
    assert len(at) == 3
    if rests:
        assert all(later - earlier >= 0.11 for earlier, later in pairwise(at))
    pages.release()


def test_a_wanted_piece_does_not_wait_for_a_rest_to_end(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PINNED_PIECE", SLOT)
    monkeypatch.setattr(host_pages, "PIN_REST", 1e6)
    monkeypatch.setattr(device, "pin", lambda pieces: time.sleep(0.01))
    monkeypatch.setattr(device, "unpin", lambda pieces: None)
    with device.computing():
        pages = HostPages(shared(3), PAGE, device)
        while not pages.is_ready(2):
            time.sleep(0.001)
        assert not pages.is_ready(1), "it is nobody's yet"
    pages.release()


@pytest.mark.parametrize("page_bytes", [1, 512, 4096, 4097, 100_000, 4 << 20])
def test_the_number_of_slots_follows_from_the_reserved_bytes(page_bytes: int) -> None:
    for slots in [*range(1, 200), 4095, 4096, 4097, 100_003]:
        nbytes = object_bytes(slots, page_bytes)
        assert slots_in(nbytes, page_bytes) == slots
        assert slots_in(nbytes - 1, page_bytes) == slots - 1
        assert nbytes % HOST_PAGE == 0
    assert slots_in(0, page_bytes) == 0


def test_the_fingerprint_depends_on_everything_that_determines_a_page_s_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(4, (BlockShape(2, 16, 16),) * 4, 64, 160, 512, 2, 2048)
    given = ("ab" * 32, torch.bfloat16, shape, 16)
    first = pages_fingerprint(*given)
    assert len(first) == 64 and pages_fingerprint(*given) == first
    others = [
        pages_fingerprint("cd" * 32, *given[1:]),
        pages_fingerprint(given[0], torch.float16, shape, 16),
        pages_fingerprint(*given[:3], 32),
        pages_fingerprint(*given[:2], dataclasses.replace(shape, has_fp8_kv=True), 16),
        *(pages_fingerprint(*given[:2], dataclasses.replace(shape, kv=kv), 16) for kv in OTHER_KV),
    ]
    monkeypatch.setattr(host_pages, "_LAYOUT", 0)
    others.append(pages_fingerprint(*given))
    assert len({first, *others}) == 1 + len(others)


OTHER_KV = (
    (BlockShape(2, 16, 16),) * 7,
    (BlockShape(7, 16, 16),) * 4,
    (BlockShape(2, 7, 7),) * 4,
    (BlockShape(2, 16, 8),) * 4,
    (BlockShape(2, 16, 16), 0, 0, BlockShape(2, 16, 16)),
    (BlockShape(2, 16, 16), 0, None, BlockShape(2, 16, 16)),
)
