"""Blocks that move from any places to any others. After each move their modules have the checkpoint's values, bit for
bit, and the budget holds exactly what the plan says."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.weights.plan import BlockPlace
from tests.support.checkpoints import altered, cast
from tests.support.loaded import MEMORY, load_weights
from tests.support.placed import assert_as_in_the_checkpoint, plan_of

PLACES = st.tuples(*[st.sampled_from(list(BlockPlace))] * 4)
OTHERS = st.tuples(
    *[st.sampled_from([BlockPlace.PLAIN, BlockPlace.STREAMED])] * 4
)  # places of blocks that have no packed form


class WeightPlacementMachine(RuleBasedStateMachine):
    @initialize(packed=st.booleans(), prefetch=st.booleans(), piece=st.sampled_from([0, 1 << 16]))
    def begin(self, packed: bool, prefetch: bool, piece: int) -> None:
        self.folder = folder()
        self.places = PLACES if packed else OTHERS
        self.device = CpuDevice(MEMORY)
        placing = Placing(packing=packed, prefetch=prefetch, piece_bytes=piece)
        self.weights = load_weights(self.folder, self.device, "bfloat16", placing=placing)

    @rule(data=st.data(), slots=st.integers(1, 4))
    def move(self, data: st.DataObject, slots: int) -> None:
        plan = plan_of(self.weights, data.draw(self.places), slots)
        self.weights.placement.move(plan)
        assert_as_in_the_checkpoint(self.weights, self.folder, passes=1)

    @rule(steps=st.integers(0, 3))
    def pass_broken_off(self, steps: int) -> None:
        for index in range(steps):
            self.weights.placement.begin(index)
            self.weights.placement.prepare(index, 1)
            self.weights.placement.end(index)
        self.weights.placement.begin(steps)
        self.weights.placement.restart()
        assert_as_in_the_checkpoint(self.weights, self.folder, passes=1)

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "weights"):
            return
        placement, rest = self.weights.placement, self.weights.rest
        assert placement.plan is not None and rest is not None
        assert (
            self.device.budget.used
            == self.weights.nbytes
            == placement.plan.nbytes + rest.nbytes + self.weights.skeleton.derived_bytes
        )
        placement.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "weights"):
            return
        self.weights.release(self.device)
        assert self.device.budget.used == 0
        self.device.close()


_kept: list[tempfile.TemporaryDirectory[str]] = []


def folder() -> Path:
    """A small llama in bfloat16, written once."""
    if not _kept:
        _kept.append(tempfile.TemporaryDirectory(prefix="djinnd-test-bf16-"))
        altered(Path(_kept[0].name) / "m", change=lambda tensors: cast(tensors, torch.bfloat16))
    return Path(_kept[0].name) / "m"


class TestWeightPlacement(WeightPlacementMachine.TestCase):
    settings = settings(max_examples=8, stateful_step_count=8)


@pytest.mark.long
class TestWeightPlacementAtLength(WeightPlacementMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=8)
