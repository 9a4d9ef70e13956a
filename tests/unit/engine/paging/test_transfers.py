"""Transfers on the CPU device, with real bytes in a real pool, host tier and page file."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from djinnd.device import CopyLane, StreamMark
from djinnd.device.cpu import CpuDevice, _CopyEvent
from djinnd.engine.memory import host_pages
from djinnd.engine.memory.host_pages import HostPages, object_bytes
from djinnd.engine.paging import page_copies
from djinnd.engine.paging.page_copies import PageCopies
from djinnd.engine.paging.transfers import Transfers
from djinnd.engine.tuning import AHEAD_S
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.page_file import PageFile
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import root
from tests.support.loaded import MEMORY
from tests.support.pinned import pinned
from tests.support.rates import RATES

PAGE, BYTES = 4, 8192  # tokens and bytes of a page
PAGES, HOST, DISK = 32, 24, 24
TENANT = 1000


class HeldCopy(_CopyEvent):
    """A copy that is done when the test says so. The compute stream waits for it, the host does not."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = False

    def order(self) -> None:
        self.is_awaited = True


class Device(CpuDevice):
    """Records copies, and fails the copies with names in `fails`."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.copies: list[str] = []
        self.fails = ""
        self.holds = False  # queued copies do not run
        self.held: list[HeldCopy] = []

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: StreamMark | None = None,
        name: str = "copy",
        lane: CopyLane = CopyLane.WEIGHTS,
    ) -> _CopyEvent:
        if name != "copy":
            self.copies.append(name)
        if self.fails and name.startswith(self.fails):
            event = _CopyEvent()
            event.finish(RuntimeError("the bus is on fire"))
            return event
        if self.holds:
            self.held.append(HeldCopy())
            return self.held[-1]
        return super().copy(target, source, after, name, lane)


class Floor:
    """Sessions with pages of random bytes. A second Floor over the same memory plays the next process."""

    def __init__(self, memory: Tensor, folder: Path, *, disk: bool = True) -> None:
        self.device = Device()
        self.kv = KvManager(PAGES + 1, PAGE, BYTES, max_context=128)
        self.pool = torch.zeros(PAGES + 1, BYTES, dtype=torch.uint8)
        self.paging = Paging(self.kv)
        self.transfers = Transfers(self.device, self.paging, lambda: self.pool, BYTES // 2)
        host = pinned(HostPages(memory, BYTES, self.device))  # so that copies can begin
        self.transfers.attach_host(host)
        if disk:
            self.transfers.attach_disk(PageFile(str(folder), "m", BYTES, DISK, "f"))

    def close(self) -> None:
        self.transfers.settle()
        self.transfers.close()
        self.device.close()

    def session(self, name: str, tokens: list[int]) -> Tensor:
        """→ uint8 [pages, page_bytes]: a copy of the session's pages."""
        self.kv.reserve(name, TENANT, len(tokens))
        pages = self.kv.pages_of(name)
        self.pool[pages] = torch.randint(0, 256, (len(pages), BYTES), dtype=torch.uint8)
        self.kv.publish(name, TENANT, tokens, len(tokens))
        return self.pool[pages].clone()

    def keys(self, tokens: list[int]) -> list[bytes]:
        return self.kv.keys_of("nobody", root(TENANT), tokens, len(tokens))

    def leave(self, name: str, tokens: list[int]) -> Transfer:
        keys = self.kv.keys_of(name, root(TENANT), tokens, len(tokens))
        transfer = self.paging.save(name, keys, len(tokens))
        self.settle()
        self.kv.drop(name)
        return transfer

    def find(self, tokens: list[int]) -> Found:
        return self.paging.find("back", root(TENANT), tokens, 0, len(tokens), (len(tokens),))

    def come_back(self, tokens: list[int]) -> tuple[Transfer, Tensor]:
        transfer = self.paging.load("back", TENANT, self.find(tokens))
        self.pool[self.kv.pages_of("back")] = 0
        assert transfer in self.settle()
        return transfer, self.pool[self.kv.pages_of("back")]

    def to_disk(self, tokens: list[int]) -> None:
        keys = self.keys(tokens)
        self.paging.write_out("a", keys)
        self.settle()
        self.paging.forget_on_host(keys)

    def turn(self) -> list[Transfer]:
        over = self.transfers.turn()
        self.transfers.begin_copies()
        return over

    def settle(self) -> list[Transfer]:
        over = self.transfers.settle()
        assert all(transfer.is_over for transfer in over)
        self.paging.check_integrity()
        return over


@pytest.fixture
def memory() -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, object_bytes(HOST, BYTES)), dtype=torch.uint8)


@pytest.fixture
def floor(memory: Tensor, tmp_path: Path) -> Iterator[Floor]:
    floor = Floor(memory, tmp_path)
    yield floor
    floor.device.fails, floor.device.holds = "", False
    floor.close()


TOKENS = list(range(26))  # seven pages, the last one partly filled
OTHERS = list(range(100, 126))


def test_pages_come_back_from_the_host_unchanged(floor: Floor) -> None:
    held = floor.session("a", TOKENS)
    assert not floor.leave("a", TOKENS).failed
    transfer, back = floor.come_back(TOKENS)
    assert torch.equal(back, held) and (transfer.tokens, transfer.failed) == (26, False)


def test_pages_come_back_from_disk_unchanged(floor: Floor) -> None:
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.to_disk(TOKENS)
    assert floor.paging.count(floor.keys(TOKENS)) == (0, 7)
    transfer, back = floor.come_back(TOKENS)
    assert torch.equal(back, held) and not transfer.failed
    assert floor.transfers.disk_rate > 0


def test_a_turn_does_not_block(floor: Floor) -> None:
    floor.device.holds = True
    floor.session("a", TOKENS)
    transfer = floor.paging.save("a", floor.kv.keys_of("a", root(TENANT), TOKENS, 26), 26)
    for _ in range(3):
        assert floor.turn() == []
    assert transfer.missing == 7
    for event in floor.device.held:
        event.finish()
    assert floor.transfers.turn() == [transfer]


def test_copies_begin_when_told_to_and_run_after_the_work_of_that_turn(floor: Floor) -> None:
    """They can be queued while the device runs the next step, and do not wait for it."""
    floor.session("a", TOKENS)
    floor.paging.save("a", floor.kv.keys_of("a", root(TENANT), TOKENS, 26), 26)
    floor.transfers.begin_copies()
    floor.transfers.turn()
    assert floor.device.copies == []
    floor.transfers.begin_copies()
    floor.transfers.begin_copies()
    assert floor.device.copies == ["demote 7"]


def test_a_move_asked_for_after_a_turn_waits_for_the_next_turn(floor: Floor) -> None:
    """The step that is composed next may still write these pages, and the mark is from before it."""
    floor.session("a", TOKENS)
    floor.session("b", OTHERS)
    floor.paging.save("a", floor.kv.keys_of("a", root(TENANT), TOKENS, 26), 26)
    floor.transfers.turn()
    floor.paging.save("b", floor.kv.keys_of("b", root(TENANT), OTHERS, 26), 26)
    floor.transfers.begin_copies()
    assert floor.device.copies == ["demote 7"] and floor.paging.moves.waiting == 7
    floor.transfers.begin_copies()
    assert floor.device.copies == ["demote 7"]
    floor.transfers.turn()
    floor.transfers.begin_copies()
    assert floor.device.copies == ["demote 7", "demote 7"] and not floor.paging.moves.waiting


def test_moves_that_end_during_a_step_are_reported_and_no_new_ones_begin(floor: Floor) -> None:
    floor.device.holds = True
    floor.session("a", TOKENS)
    floor.session("b", OTHERS)
    leaving = floor.paging.save("a", floor.kv.keys_of("a", root(TENANT), TOKENS, 26), 26)
    floor.turn()
    following = floor.paging.save("b", floor.kv.keys_of("b", root(TENANT), OTHERS, 26), 26)
    for event in floor.device.held:
        event.finish()
    assert floor.transfers.end() == [leaving]
    floor.transfers.begin_copies()
    assert floor.device.copies == ["demote 7"], "the rest is found in the next turn"
    assert floor.turn() == []
    assert floor.device.copies == ["demote 7", "demote 7"] and following.missing == 7
    for event in floor.device.held:
        event.finish()


def test_a_dropped_transfer_is_not_copied(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copies, "COPY_BYTES", BYTES)
    monkeypatch.setattr(page_copies, "HELD_BYTES", BYTES)
    monkeypatch.setattr(page_copies.time, "monotonic", lambda: 0.0)
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    held = floor.session("b", OTHERS)
    floor.leave("b", OTHERS)
    floor.device.copies.clear()
    transfer = floor.paging.load("back", TENANT, floor.find(TOKENS))
    floor.transfers.turn()
    floor.transfers.begin_copies(1.0)
    assert floor.device.copies == ["promote 1"]
    floor.paging.moves.drop(transfer)
    floor.kv.drop("back")
    coming = floor.paging.load("other", TENANT, floor.find(OTHERS))
    assert coming in floor.settle() and transfer.failed
    assert floor.device.copies == ["promote 1"] * 8
    assert torch.equal(floor.pool[floor.kv.pages_of("other")], held)


def test_copies_that_no_call_waits_for_are_held_to_a_rate(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small pieces. They give way to copies that a call waits for, also if that becomes known later."""
    clock = [0.0]
    monkeypatch.setattr(page_copies.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(page_copies, "HELD_BYTES", BYTES)
    sizes = {"a": TOKENS, "b": OTHERS}
    leaving = {}
    for name, tokens in sizes.items():
        floor.session(name, tokens)
        leaving[name] = floor.paging.save(name, floor.kv.keys_of(name, root(TENANT), tokens, 26), 26)
    slow = BYTES * 10.0  # a page in a tenth of a second

    def begun() -> int:
        floor.transfers.turn()
        before = len(floor.device.copies)
        floor.transfers.begin_copies(slow)
        return len(floor.device.copies) - before

    assert [begun() for _ in range(3)] == [1, 0, 0]
    clock[0] = 0.1
    assert [begun() for _ in range(3)] == [1, 0, 0]
    floor.paging.moves.hurry(leaving["b"])
    floor.device.holds = True
    assert begun() == 1
    assert floor.device.copies == ["demote 1", "demote 1", "demote 7"], "all of b's"
    held, floor.device.holds = floor.device.held, False
    for event in held:
        event.finish()
    assert leaving["b"] in floor.settle() and leaving["a"].is_over


# --- copies -----------------------------------------------------------------------------------------------------------


def test_neighbouring_pages_are_one_copy(floor: Floor) -> None:
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.come_back(TOKENS)
    assert floor.device.copies == ["demote 7", "promote 7"]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_neighbouring_pages_are_one_copy_after_many_evictions(floor: Floor, rounds: int) -> None:
    """They get the slots of the session that left first; its last page is evicted first."""
    for number in range(3 * rounds):  # eight pages each, of 24 slots
        tokens = list(range(100 * number, 100 * number + 32))
        floor.session("a", tokens)
        floor.leave("a", tokens)
        floor.paging.mark_unneeded(floor.keys(tokens))
    floor.device.copies.clear()
    held = floor.session("a", tokens := list(range(1000, 1032)))
    floor.leave("a", tokens)
    assert torch.equal(floor.come_back(tokens)[1], held)
    assert floor.device.copies == ["demote 8", "promote 8"]


def test_pages_that_are_apart_at_one_end_are_separate_copies(floor: Floor) -> None:
    floor.session("x", [90] * 4)
    floor.session("a", TOKENS[:8])
    floor.session("y", [91] * 4)
    floor.kv.drop("x")
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    assert sorted(floor.device.copies) == ["demote 2", "demote 5"]


@pytest.mark.parametrize(("module", "name"), [(host_pages, "PINNED_PIECE"), (page_copies, "COPY_BYTES")])
def test_a_copy_is_no_larger_than_a_piece(
    memory: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """Neither a piece of pinned memory, because no copy may cross its end, nor a piece of a lane."""
    monkeypatch.setattr(module, name, 3 * BYTES + 1)
    floor = Floor(memory, tmp_path)
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    assert sorted(floor.device.copies) == ["demote 1", "demote 3", "demote 3"]
    assert torch.equal(floor.come_back(TOKENS)[1], held)
    floor.close()


def test_the_first_piece_does_not_wait_for_the_others_bookkeeping(
    floor: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    monkeypatch.setattr(page_copies, "COPY_BYTES", 3 * BYTES)
    done, add = list[str](), PageCopies.add
    monkeypatch.setattr(PageCopies, "add", lambda copies, move: (done.append("book"), add(copies, move)))
    floor.device.copies = done
    floor.come_back(TOKENS)
    assert done == ["book"] * 3 + ["promote 3"] + ["book"] * 4 + ["promote 3", "promote 1"]


@pytest.mark.parametrize("weights_stream", [False, True])
def test_no_more_is_in_flight_than_the_bus_needs(
    floor: Floor, monkeypatch: pytest.MonkeyPatch, weights_stream: bool
) -> None:
    monkeypatch.setattr(page_copies, "COPY_BYTES", BYTES)
    monkeypatch.setattr(page_copies, "IN_FLIGHT", 4 * BYTES)
    monkeypatch.setattr(page_copies, "IN_FLIGHT_STREAMING", 2 * BYTES)
    floor.transfers.weights_stream = weights_stream
    floor.device.holds = True
    most = 2 if weights_stream else 4
    floor.session("a", TOKENS)
    transfer = floor.paging.save("a", floor.kv.keys_of("a", root(TENANT), TOKENS, 26), 26)
    landed = 0
    while not transfer.is_over:
        floor.turn()
        under_way = floor.device.held[landed:]
        assert len(under_way) == min(most, 7 - landed)
        under_way[0].finish()
        landed += 1
        floor.transfers.turn()
        assert transfer.missing == 7 - landed


def test_a_step_follows_the_last_copies_of_a_transfer_that_are_about_to_end(
    floor: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copies, "COPY_BYTES", BYTES)
    monkeypatch.setattr(floor.device, "_rates", replace(RATES, bus=3 * BYTES / AHEAD_S))
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    transfer = floor.paging.load("back", TENANT, floor.find(TOKENS))
    floor.device.holds = True
    floor.turn()
    held = floor.device.held
    assert len(held) == 7 and floor.transfers.follow() == [], "seven are too many"
    for event in held[:4]:
        event.finish()
    assert floor.transfers.turn() == []
    assert floor.transfers.follow() == [transfer]
    assert [event.is_awaited for event in held] == [False] * 4 + [True] * 3
    assert transfer.is_over and not transfer.failed and floor.paging.is_busy
    assert floor.transfers.follow() == []
    for event in held[4:]:
        assert floor.paging.is_busy
        event.finish()
        assert floor.transfers.turn() == []
    assert not floor.paging.is_busy
    floor.paging.check_integrity()


def test_no_step_follows_a_failed_copy(floor: Floor) -> None:
    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    transfer = floor.paging.load("back", TENANT, floor.find(TOKENS))
    floor.device.fails = "promote"
    floor.turn()
    assert floor.transfers.follow() == [] and not transfer.is_over
    assert floor.settle() == [transfer] and transfer.failed


# --- in halves --------------------------------------------------------------------------------------------------------


@pytest.fixture
def halving(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> Floor:
    """The first halves of three pages take as long as launching a step."""
    monkeypatch.setattr(page_copies, "HALF_BYTES", BYTES // 2)
    bus = 3 * BYTES / 2 / AHEAD_S
    monkeypatch.setattr(floor.device, "_rates", replace(RATES, bus=bus))
    return floor


HALVES = ["promote first half"] * 3 + ["promote second half"] * 3


def awaited(floor: Floor, tokens: list[int] = TOKENS) -> Transfer:
    """The pages come back, and a call waits for them."""
    transfer = floor.paging.load("back", TENANT, floor.find(tokens))
    floor.paging.moves.hurry(transfer)
    return transfer


def test_the_last_pages_that_a_call_waits_for_come_in_halves(halving: Floor) -> None:
    held = halving.session("a", TOKENS)
    halving.leave("a", TOKENS)
    halving.device.copies.clear()
    transfer = awaited(halving)
    halving.pool[halving.kv.pages_of("back")] = 0
    assert transfer in halving.settle() and not transfer.failed
    assert halving.device.copies == ["promote 4", *HALVES]
    assert torch.equal(halving.pool[halving.kv.pages_of("back")], held)


def test_a_step_follows_the_first_halves(halving: Floor) -> None:
    halving.session("a", TOKENS)
    halving.leave("a", TOKENS)
    transfer = awaited(halving)
    halving.device.holds = True
    halving.turn()
    whole, *held = halving.device.held
    assert halving.transfers.follow() == [], "four pages take longer than launching a step"
    whole.finish()
    assert halving.turn() == [] and halving.transfers.follow() == [transfer]
    assert [event.is_awaited for event in held] == [False, False, True, False, False, False]
    with halving.device.computing(late=True):
        assert not held[-1].is_awaited
    halving.device.catch_up()
    assert [event.is_awaited for event in held] == [False, False, True, False, False, True]
    for event in held:
        assert halving.paging.is_busy
        event.finish()
        assert halving.transfers.turn() == []
    assert not halving.paging.is_busy
    halving.paging.check_integrity()


def test_a_session_of_few_pages_comes_in_halves_only(halving: Floor) -> None:
    held = halving.session("a", TOKENS[:12])
    halving.leave("a", TOKENS[:12])
    halving.device.copies.clear()
    transfer = awaited(halving, TOKENS[:12])
    assert transfer in halving.settle() and halving.device.copies == HALVES
    assert torch.equal(halving.pool[halving.kv.pages_of("back")], held)


@pytest.mark.parametrize("why", ["nobody waits", "others decode", "weights stream", "halves are small"])
def test_pages_come_whole_where_halves_would_gain_nothing(
    halving: Floor, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    halving.session("a", TOKENS)
    halving.leave("a", TOKENS)
    halving.device.copies.clear()
    if why == "nobody waits":
        halving.paging.load("back", TENANT, halving.find(TOKENS))
    else:
        awaited(halving)
    halving.transfers.weights_stream = why == "weights stream"
    if why == "halves are small":
        monkeypatch.setattr(page_copies, "HALF_BYTES", BYTES)
    halving.transfers.turn()
    halving.transfers.begin_copies(1e12 if why == "others decode" else math.inf)
    halving.settle()
    whole = [name.removeprefix("promote ") for name in halving.device.copies]
    assert sum(map(int, whole)) == 7


def test_of_two_arriving_sessions_only_the_last_pages_come_in_halves(halving: Floor) -> None:
    held = {}
    for name, tokens in (("a", TOKENS), ("b", OTHERS)):
        held[name] = halving.session(name, tokens)
        halving.leave(name, tokens)
    halving.device.copies.clear()
    coming = {}
    for name, tokens in (("a", TOKENS), ("b", OTHERS)):
        found = halving.paging.find(name, root(TENANT), tokens, 0, len(tokens), (len(tokens),))
        coming[name] = halving.paging.load(name, TENANT, found)
        halving.paging.moves.hurry(coming[name])
    assert {*halving.settle()} == {*coming.values()}
    assert halving.device.copies[-6:] == HALVES
    for name, pages in held.items():
        assert torch.equal(halving.pool[halving.kv.pages_of(name)], pages)


class EndsWhileLookedAt(Future[int]):
    looked = 0

    def done(self) -> bool:
        self.looked += 1
        return self.looked > 1


def test_a_job_that_ends_between_two_polls_ends_once(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    write = floor.transfers.disk.write  # type: ignore[union-attr]

    def written(slot: int, source: npt.NDArray[np.uint8]) -> Future[int]:
        future = EndsWhileLookedAt()
        future.set_result(write(slot, source).result())
        return future

    monkeypatch.setattr(floor.transfers.disk, "write", written)
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.to_disk(TOKENS)
    assert torch.equal(floor.come_back(TOKENS)[1], held)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_copy_loses_only_its_pages(floor: Floor) -> None:
    held = floor.session("a", TOKENS)
    floor.device.fails = "demote"
    assert floor.leave("a", TOKENS).failed
    assert floor.find(TOKENS).keys == () and floor.kv.pool.used == 0
    floor.device.fails = ""
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.device.fails = "promote"
    assert floor.come_back(TOKENS)[0].failed
    floor.device.fails = ""
    floor.kv.drop("back")
    assert floor.find(TOKENS).keys == () and held.any(), "nobody asks for them again and again"


def left_by_another_process(memory: Tensor, folder: Path) -> Tensor:
    """Seven pages on the host; the first three of them are on disk too."""
    floor = Floor(memory, folder)
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.paging.write_out("a", floor.keys(TOKENS)[:3])
    floor.close()
    return held


def flip(memory: Tensor, page: Tensor) -> None:
    """Flips a bit of that page, wherever it lies."""
    slots = memory[-HOST * BYTES :].view(HOST, BYTES)
    (index,) = slots.eq(page).all(1).nonzero().flatten().tolist()
    slots[index, 4321] ^= 8


def test_another_process_finds_the_pages(memory: Tensor, tmp_path: Path) -> None:
    held = left_by_another_process(memory, tmp_path)
    floor = Floor(memory, tmp_path)
    transfer, back = floor.come_back(TOKENS)
    assert torch.equal(back, held) and not transfer.failed
    floor.close()


def test_a_flipped_bit_on_the_host_is_found_and_the_page_is_dropped(memory: Tensor, tmp_path: Path) -> None:
    held = left_by_another_process(memory, tmp_path)
    flip(memory, held[4])
    floor = Floor(memory, tmp_path)
    assert floor.come_back(TOKENS)[0].failed
    floor.kv.drop("back")
    assert floor.find(TOKENS).tokens == 16
    transfer, back = floor.come_back(TOKENS[:16])
    assert torch.equal(back, held[:4]) and not transfer.failed
    floor.close()


def test_a_page_with_a_flipped_bit_is_not_written_to_disk(memory: Tensor, tmp_path: Path) -> None:
    held = left_by_another_process(memory, tmp_path)
    flip(memory, held[4])
    floor = Floor(memory, tmp_path)
    floor.paging.write_out("a", floor.keys(TOKENS))
    (transfer,) = floor.settle()
    assert transfer.failed and floor.paging.disk is not None and floor.paging.disk.used == 6
    assert floor.find(TOKENS).tokens == 16
    floor.close()


def test_a_flipped_bit_on_disk_is_found_and_the_other_pages_come(floor: Floor, tmp_path: Path) -> None:
    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.to_disk(TOKENS)
    (path,) = tmp_path.glob("*.pages")
    data = bytearray(path.read_bytes())
    at = data.index(held[2].numpy().tobytes())
    data[at + 99] ^= 1
    with path.open("r+b") as file:
        file.write(data)
        os.fsync(file.fileno())
    assert floor.come_back(TOKENS)[0].failed
    floor.kv.drop("back")
    assert floor.find(TOKENS).tokens == 8
    transfer, back = floor.come_back(TOKENS[:8])
    assert torch.equal(back, held[:2]) and not transfer.failed


def test_a_full_disk_loses_no_page(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    monkeypatch.setattr(os, "pwritev", full)
    floor.paging.write_out("a", floor.keys(TOKENS))
    (transfer,) = floor.settle()
    assert transfer.failed and floor.paging.disk is not None and floor.paging.disk.used == 0
    assert torch.equal(floor.come_back(TOKENS)[1], held)


def test_an_unreadable_disk_is_asked_once(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    floor.session("a", TOKENS)
    floor.leave("a", TOKENS)
    floor.to_disk(TOKENS)
    monkeypatch.setattr(os, "preadv", broken)
    assert floor.come_back(TOKENS)[0].failed
    floor.kv.drop("back")
    assert floor.find(TOKENS).keys == () and floor.kv.pool.used == 0
