"""The ring over two streams that run in any order: every block that computes has its own bytes, from the beginning of
its work to the end, whichever copies run meanwhile."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from djinnd.device import Device
from djinnd.weights.ring import Ring, RingRegion, distances, place_regions
from tests.support.streams import TwoStreams

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=9)


class RingMachine(RuleBasedStateMachine):
    """`turn` counts the blocks that were taken since the last restart."""

    @initialize(
        sizes=SIZES,
        room=st.integers(0, 40),
        piece=st.integers(1, 14),
        prefetch=st.booleans(),
        wide=st.booleans(),
        gaps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=9, max_size=9),
    )
    def begin(
        self, sizes: list[int], room: int, piece: int, prefetch: bool, wide: bool, gaps: list[tuple[int, int]]
    ) -> None:
        capacity = max(sizes) + room
        self.streams = TwoStreams()
        self.regions = place_regions(sizes, capacity)
        memory = torch.full((capacity,), -1, dtype=torch.int16 if wide else torch.uint8).view(torch.uint8)
        # Each block's bytes: its number, and the place in it. With another dtype, pieces are cut at its items.
        step = 2 if wide else 1
        kind = torch.int16 if wide else torch.uint8
        self.blocks = [torch.arange(size).add(20 * k).to(kind) for k, size in enumerate(sizes)]
        self.targets = [memory[r.start * step : r.end * step].view(kind) for r in self.regions]
        regions = [RingRegion(r.start * step, r.end * step) for r in self.regions]
        device = cast(Device, self.streams)
        spans = [range(min(min(gap), size), min(max(gap), size)) for gap, size in zip(gaps, sizes, strict=False)]
        self.left_out = {k: [span] for k, span in enumerate(spans) if span}
        self.ring = Ring(
            device,
            memory,
            regions,
            self.source,
            prefetch=prefetch,
            piece=piece * step,
            left_out=self.left_out,
        )
        self.prefetch = prefetch
        self.turn = 0
        self.taken = False
        self.is_short = False
        self.is_whole = True  # the block that was taken

    def source(self, k: int) -> tuple[Tensor, Tensor]:
        return self.targets[k], self.blocks[k]

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self) -> None:
        assert self.ring.next == self.turn % len(self.blocks)
        self.is_whole = self.ring.take()
        assert self.is_whole or (self.is_short and self.turn % len(self.blocks) in self.left_out)
        self.taken = True
        self.compute()

    @precondition(lambda self: self.taken)
    @rule()
    def compute(self) -> None:
        """Launches a kernel that reads the block."""
        k = self.turn % len(self.blocks)
        missing = [] if self.is_whole else [number for span in self.left_out[k] for number in span]

        def check() -> None:
            found = self.targets[k].tolist()
            wanted = self.blocks[k].tolist()
            for number in missing:
                wanted[number] = found[number]
            assert found == wanted, f"block {k} is computed with {found}"

        self.streams.launch(check)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        """The block's last kernel overwrites it, so that no later turn can find old bytes that are right by chance."""
        target = self.targets[self.turn % len(self.blocks)]
        self.streams.launch(lambda: target.fill_(255))
        self.ring.give_back()
        self.taken = False
        self.turn += 1

    @precondition(lambda self: not self.taken)
    @rule(short=st.booleans())
    def begin_pass(self, short: bool) -> None:
        self.ring.begin(short=short)
        self.is_short = short

    @precondition(lambda self: not self.taken)
    @rule(count=st.integers(0, 20))
    def skip(self, count: int) -> None:
        self.ring.skip(count)
        self.turn += count

    @rule(compute=st.integers(0, 20), copies=st.integers(0, 20))
    def run(self, compute: int, copies: int) -> None:
        for _ in range(copies):
            self.streams.advance_copies()
        for _ in range(compute):
            self.streams.advance_compute()

    @rule()
    def run_dry(self) -> None:
        """No stream waits for an event that never happens."""
        self.streams.synchronize()

    @rule()
    def broken_off(self) -> None:
        """Ends the pass at any point."""
        self.ring.restart()
        self.turn, self.taken = 0, False

    @invariant()
    def sound(self) -> None:
        self.ring.check_integrity()
        if not self.prefetch:
            return
        ahead = self.ring._queued
        blocked = (ahead - distances(self.regions)[ahead % len(self.regions)]) >= self.ring._given_back
        assert blocked, "a copy could have been queued and was not"


class TestRing(RingMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=60)


@pytest.mark.long
class TestRingAtLength(RingMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60)


@given(SIZES, st.integers(0, 40))
def test_regions_follow_each_other_skip_the_end_and_never_wrap(sizes: list[int], room: int) -> None:
    capacity = max(sizes) + room
    regions = place_regions(sizes, capacity)
    assert regions[0].start == 0
    for index, (region, size) in enumerate(zip(regions, sizes, strict=True)):
        assert region.end - region.start == size and region.end <= capacity
        if index:
            before = regions[index - 1]
            assert region.start == (before.end if before.end + size <= capacity else 0)


@given(SIZES, st.integers(0, 40))
def test_a_block_waits_for_the_last_one_before_it_that_was_in_its_way(sizes: list[int], room: int) -> None:
    regions = place_regions(sizes, max(sizes) + room)
    count = len(regions)
    for turn, distance in enumerate(distances(regions)):
        assert 1 <= distance <= count
        between = [regions[(turn - back) % count] for back in range(1, distance)]
        assert not any(regions[turn].overlaps(other) for other in between)
        assert regions[turn].overlaps(regions[(turn - distance) % count])
