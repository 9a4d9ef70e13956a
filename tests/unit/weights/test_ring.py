"""The ring on a CPU device, which makes real copies in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor

from djinnd.device import CopyLane, Device
from djinnd.device.cpu import CpuDevice
from djinnd.weights.ring import Ring, RingRegion, place_regions
from tests.support.streams import TwoStreams
from tests.support.troubled import TroubledDevice


@pytest.fixture
def device() -> Iterator[TroubledDevice]:
    device = TroubledDevice(1 << 20)
    yield device
    device.let_go()
    device.close()


class Scene:
    """A ring with blocks of `sizes` bytes. Every byte of a block is the block's number plus one."""

    def __init__(self, device: CpuDevice, sizes: list[int], capacity: int, **options: object) -> None:
        self.device = device
        self.memory = torch.zeros(capacity, dtype=torch.uint8)
        self.blocks = [torch.full((size,), k + 1, dtype=torch.uint8) for k, size in enumerate(sizes)]
        self.regions = place_regions(sizes, capacity)
        self.ring = Ring(device, self.memory, self.regions, self.source, **options)  # type: ignore[arg-type]

    def source(self, k: int) -> tuple[Tensor, Tensor]:
        return self.region(k), self.blocks[k]

    def region(self, k: int) -> Tensor:
        return self.memory[self.regions[k].start : self.regions[k].end]

    def turn(self) -> int:
        """Takes one block, checks it then and again before it is given back → its number."""
        k = self.ring.next
        self.ring.take()
        self.ring.check_integrity()
        found = self.region(k).clone()
        self.device.synchronize()  # completes all queued copies
        assert torch.equal(found, self.blocks[k]) and torch.equal(self.region(k), self.blocks[k])
        self.ring.give_back()
        self.ring.check_integrity()
        return k


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("capacity", [100, 200, 250, 300, 400])
def test_blocks_of_one_size_pass_in_order_pass_after_pass(
    device: TroubledDevice, capacity: int, prefetch: bool
) -> None:
    scene = Scene(device, [100] * 4, capacity, prefetch=prefetch)
    assert [scene.turn() for _ in range(10)] == [0, 1, 2, 3] * 2 + [0, 1]


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_a_copy_may_be_divided_into_pieces(device: TroubledDevice, piece: int) -> None:
    scene = Scene(device, [100, 30, 60], 130, piece=piece)
    assert [scene.turn() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert device.largest <= piece


def test_a_block_that_does_not_fit_before_the_end_begins_at_the_start(device: TroubledDevice) -> None:
    scene = Scene(device, [60, 30, 50, 40], 100)
    assert scene.regions == [RingRegion(0, 60), RingRegion(60, 90), RingRegion(0, 50), RingRegion(50, 90)]
    assert [scene.turn() for _ in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_single_block_may_have_the_whole_ring(device: TroubledDevice) -> None:
    scene = Scene(device, [64], 64)
    assert [scene.turn() for _ in range(3)] == [0, 0, 0]


def test_slots_are_filled_before_the_first_block_is_taken(device: TroubledDevice) -> None:
    scene = Scene(device, [100] * 4, 300)
    device.synchronize()
    assert [int(scene.region(k)[0]) for k in range(3)] == [1, 2, 3]


def test_the_first_blocks_of_the_next_pass_are_copied_while_this_one_ends(device: TroubledDevice) -> None:
    scene = Scene(device, [100] * 4, 300)
    for _ in range(4):
        scene.turn()
    device.synchronize()
    assert scene.memory[:100].tolist() == [1] * 100


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("capacity", [100, 200, 250, 400])
def test_skipped_turns_are_not_copied_unless_queued_before(
    device: TroubledDevice, capacity: int, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(device, [100] * 4, capacity, prefetch=prefetch)
    copied: list[int] = []
    meet = device.meet

    def noted(target: Tensor, source: Tensor) -> None:
        copied.append(source.data_ptr())
        meet(target, source)

    monkeypatch.setattr(device, "meet", noted)
    found = []
    for before, taken, after in [(0, 4, 0), (3, 1, 0), (1, 2, 1), (0, 0, 4), (2, 2, 0), (0, 1, 3), (0, 4, 0)]:
        scene.ring.skip(before)
        scene.ring.check_integrity()
        found += [scene.turn() for _ in range(taken)]
        scene.ring.skip(after)
        scene.ring.check_integrity()
    assert found == [0, 1, 2, 3, 3, 1, 2, 2, 3, 0, 0, 1, 2, 3]
    device.synchronize()
    if not prefetch:
        assert [source for source in copied if source] == [scene.blocks[k].data_ptr() for k in found]


def test_a_copy_over_a_skipped_block_comes_after_that_block_s_copy(device: TroubledDevice) -> None:
    """The skipped block's copy is still under way when its turn is skipped."""
    device.delay = 0.01
    scene = Scene(device, [100] * 3, 100)
    scene.ring.skip(1)
    assert [scene.turn() for _ in range(3)] == [1, 2, 0]


def test_without_prefetch_nothing_is_copied_before_its_turn(device: TroubledDevice) -> None:
    scene = Scene(device, [100] * 4, 300, prefetch=False)
    device.synchronize()
    assert not bool(scene.memory.any())
    scene.turn()
    device.synchronize()
    assert not bool(scene.memory[100:].any())


def test_compute_waits_for_a_late_copy(device: TroubledDevice) -> None:
    scene = Scene(device, [100] * 3, 200)
    device.delay = 0.01
    assert [scene.turn() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_failed_copy_is_raised_at_its_turn_and_restart_recovers(device: TroubledDevice) -> None:
    scene = Scene(device, [100] * 3, 200)
    device.fail(scene.blocks[2])
    assert [scene.turn(), scene.turn()] == [0, 1]
    with pytest.raises(OSError, match="the bus has caught fire"):
        scene.ring.take()
    scene.ring.restart()
    scene.ring.check_integrity()
    assert [scene.turn() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("taken", [False, True])
def test_restart_begins_with_the_first_block(device: TroubledDevice, turns: int, taken: bool) -> None:
    scene = Scene(device, [60, 30, 50, 40], 100)
    for _ in range(turns):
        scene.turn()
    if taken:
        scene.ring.take()
    scene.ring.restart()
    assert [scene.turn() for _ in range(5)] == [0, 1, 2, 3, 0]


def test_turns_are_taken_and_given_back_one_by_one(device: TroubledDevice) -> None:
    ring = Scene(device, [100] * 3, 200).ring
    with pytest.raises(AssertionError):
        ring.give_back()
    ring.take()
    with pytest.raises(AssertionError, match="has not been given back"):
        ring.take()


def test_check_integrity_detects_a_region_that_is_filled_while_in_use(device: TroubledDevice) -> None:
    ring = Scene(device, [100] * 3, 200).ring
    ring._queue(None)  # the third block overwrites the first, which waits for its turn
    with pytest.raises(AssertionError, match="are in use at once"):
        ring.check_integrity()


def test_a_region_outside_of_the_memory_is_an_assertion(device: TroubledDevice) -> None:
    memory = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        Ring(device, memory, [RingRegion(0, 11)], lambda k: (memory, memory))
    with pytest.raises(AssertionError):
        place_regions([11], 10)


def test_a_copy_after_a_skipped_block_waits_for_the_block_that_computes_before_it() -> None:
    """The third block overlaps both others, and the second is skipped."""
    streams, memory = TwoStreams(), torch.zeros(12, dtype=torch.uint8)
    blocks = [torch.full((size,), k + 1, dtype=torch.uint8) for k, size in enumerate((6, 6, 12))]
    regions = [RingRegion(0, 6), RingRegion(6, 12), RingRegion(0, 12)]
    targets = [memory[region.start : region.end] for region in regions]
    ring = Ring(cast(Device, streams), memory, regions, lambda k: (targets[k], blocks[k]))
    found: list[bool] = []
    ring.take()
    streams.launch(lambda: found.append(torch.equal(targets[0], blocks[0])))
    ring.give_back()
    ring.skip(1)
    for _ in range(9):
        streams.advance_copies()
    streams.synchronize()
    assert found == [True]


class ShortScene(Scene):
    """The last 40 of each block's 100 bytes are left out by short passes. A block is zeroed before it is given back."""

    def __init__(self, device: CpuDevice, capacity: int, **options: object) -> None:
        left_out = {k: [range(60, 80), range(80, 100)] for k in (0, 1, 3)}
        super().__init__(device, [100] * 4, capacity, left_out=left_out, **options)

    def pass_(self) -> list[bool]:
        """Takes each block → whether it came whole."""
        found = []
        for k in range(4):
            found.append(self.ring.take())
            self.ring.check_integrity()
            self.device.synchronize()
            end = 100 if found[-1] else 60
            assert torch.equal(self.region(k)[:end], self.blocks[k][:end])
            self.region(k).zero_()
            self.ring.give_back()
        return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_short_passes_leave_parts_of_blocks_out(device: TroubledDevice, prefetch: bool) -> None:
    scene = ShortScene(device, 200, prefetch=prefetch)
    scene.ring.begin(short=True)
    ahead = [True] * 2 if prefetch else [False] * 2  # were queued before the kind of pass was known
    assert scene.pass_() == [*ahead, True, False]
    copied = device.copied[CopyLane.WEIGHTS]
    scene.ring.begin(short=True)
    assert scene.pass_() == [False, False, True, False]
    assert device.copied[CopyLane.WEIGHTS] - copied == 4 * 100 - 3 * 40


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_whole_pass_after_a_short_one_gets_what_the_ring_lacks(device: TroubledDevice, prefetch: bool) -> None:
    scene = ShortScene(device, 300, prefetch=prefetch)
    for _ in range(3):
        for short in (True, True, False, False):
            scene.ring.begin(short=short)
            found = scene.pass_()
            assert short or found == [True] * 4


def test_skipped_blocks_of_a_short_pass_lack_nothing_later(device: TroubledDevice) -> None:
    scene = ShortScene(device, 200)
    scene.ring.begin(short=True)
    scene.pass_()
    scene.ring.begin(short=True)
    scene.ring.skip(4)
    scene.ring.check_integrity()
    scene.ring.begin(short=False)
    assert scene.pass_() == [True] * 4
