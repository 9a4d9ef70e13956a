from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from djinn_client.errors import OutOfMemory
from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.model.placing.loader import Weights
from djinnd.weights.plan import BlockPlace
from tests.support.checkpoints import altered, cast
from tests.support.loaded import MEMORY, load_weights
from tests.support.models import reduced_model
from tests.support.parameters import FEW_FAMILIES
from tests.support.placed import WatchedDevice, assert_as_in_the_checkpoint, plan_of, tensors_of

P, K, S = BlockPlace.PLAIN, BlockPlace.PACKED, BlockPlace.STREAMED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, which can be packed."""
    return altered(tmp_path_factory.mktemp("bf16") / "m", "qwen2", lambda tensors: cast(tensors, torch.bfloat16))


@pytest.fixture
def device() -> Iterator[WatchedDevice]:
    device = WatchedDevice(MEMORY)
    yield device
    assert device.budget.used == 0
    device.close()


@pytest.fixture
def weights(device: CpuDevice, folder: Path) -> Iterator[Weights]:
    weights = load_weights(folder, device, "bfloat16")
    yield weights
    weights.release(device)


WAYS: list[list[tuple[BlockPlace, ...]]] = [
    [(K, K, K, K), (P, P, P, P)],
    [(S, S, S, S), (P, P, P, P), (S, S, S, S)],
    [(P, S, P, S), (S, P, S, P)],
    [(K, S, P, S), (P, K, S, S), (S, S, K, P)],
    [(P, K, P, K), (K, P, K, P), (P, P, P, S)],
    [(K, S, K, S), (K, S, K, S)],
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join("".join(p.value[1] for p in places) for places in way))
def test_modules_see_the_checkpoint_in_every_place(
    weights: Weights, device: CpuDevice, folder: Path, way: list[tuple[BlockPlace, ...]]
) -> None:
    for places in way:
        plan = plan_of(weights, places)
        weights.placement.move(plan)
        assert weights.placement.plan is plan
        assert weights.rest is not None
        always = weights.rest.nbytes + weights.skeleton.derived_bytes
        assert device.budget.used == weights.nbytes == plan.nbytes + always
        assert_as_in_the_checkpoint(weights, folder, passes=2)


def test_modules_read_small_matrices_where_they_are_stored(device: CpuDevice, tmp_path: Path) -> None:
    """gpt-oss has three: the matrix of its router, and two of biases of experts."""
    folder = altered(tmp_path, "gpt-oss", lambda tensors: cast(tensors, torch.bfloat16))
    weights = load_weights(folder, device, "bfloat16")
    weights.placement.move(plan_of(weights, (K, S, P, S)))
    assert_as_in_the_checkpoint(weights, folder, passes=2)
    for block in weights.placement._blocks[:2]:
        small = [name for (name,) in block.layout.units[len(block.layout.large) :]]
        assert [name.rpartition(".")[2] for name in small] == ["weight", "gate_up_proj_bias", "down_proj_bias"]
        assert block.packed is not None
        where = block.packed.untyped_storage().data_ptr()
        assert {block.module.get_parameter(name).untyped_storage().data_ptr() for name in small} == {where}
    weights.release(device)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"piece_bytes": 1 << 16}], ids=str)
def test_streamed_blocks_pass_in_any_number_of_slots(
    device: CpuDevice, folder: Path, slots: int, options: dict[str, object]
) -> None:
    placing = Placing(resident=0, slots=slots, **options)  # type: ignore[arg-type]
    weights = load_weights(folder, device, "bfloat16", placing=placing)
    plan = weights.placement.plan
    assert plan is not None and (plan.slots, plan.count(S)) == (slots, 4)
    assert_as_in_the_checkpoint(weights, folder, passes=3)
    weights.release(device)


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_plain_blocks_are_not_unpacked(device: CpuDevice, folder: Path, dtype: str) -> None:
    """Blocks are streamed in the checkpoint's dtype and computed in another."""
    weights = load_weights(folder, device, dtype, placing=Placing(resident=2))
    plan = weights.placement.plan
    assert plan is not None and plan.scratch_bytes == 0 and plan.places == (P, S, P, S)
    assert any("only bfloat16 weights can be packed" in note for note in weights.notes)
    assert_as_in_the_checkpoint(weights, folder, passes=2)
    weights.release(device)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_family_streams(device: CpuDevice, family: str) -> None:
    folder = reduced_model(family)
    weights = load_weights(folder, device, placing=Placing(resident=1, slots=2))
    assert_as_in_the_checkpoint(weights, folder, passes=2)
    weights.release(device)


def held_by(block: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(block) if tensor.device.type != "meta"}


def test_dropped_memory_is_freed_without_the_garbage_collector(device: WatchedDevice, weights: Weights) -> None:
    """After a move nothing references the old memory: blocks of every place, scratch and ring."""
    placement, blocks = weights.placement, weights.skeleton.adapter.blocks
    placement.move(plan_of(weights, (P, K, S, S)))
    gc.collect()
    assert device.alive() == ["block 0 of m", "block 1 of m", "rest of m", "ring of m", "scratch of m"]
    assert all(held_by(block) for block in blocks)
    gc.disable()
    try:
        placement.make_room(plan_of(weights, (S, S, P, P)))
        assert device.alive() == ["rest of m"] and not any(held_by(block) for block in blocks)
    finally:
        gc.enable()
    placement.move(plan_of(weights, (S, S, P, P)))


def test_blocks_that_stay_are_not_copied_again(device: WatchedDevice, weights: Weights) -> None:
    placement = weights.placement
    placement.move(plan_of(weights, (P, K, S, P)))
    before = len(device.allocated)
    told: list[tuple[int, int]] = []
    placement.move(plan_of(weights, (P, K, P, S)), lambda done, total: told.append((done, total)))
    assert {label for label, _ in device.allocated[before:]} == {"scratch of m", "block 2 of m", "ring of m"}
    assert len(told) == 1 and told[0][0] == told[0][1]


def test_old_memory_is_freed_before_new_memory_is_allocated(device: CpuDevice, folder: Path) -> None:
    """Moves from all plain to all packed and back, in a budget for only one of them and the extra memory of a move."""
    weights = load_weights(folder, device, "bfloat16")
    plain, packed = plan_of(weights, (P,) * 4), plan_of(weights, (K,) * 4)
    staging = max(form.nbytes for form in weights.store.forms if form is not None)
    filler = device.budget.free - max(plain.nbytes + staging, packed.nbytes) + plain.nbytes
    device.budget.reserve("somebody else", filler)
    for plan in (packed, plain, packed, plain):
        weights.placement.move(plan)
        assert_as_in_the_checkpoint(weights, folder, passes=1)
    device.budget.release("somebody else")
    weights.release(device)


def test_a_move_that_is_broken_off_can_still_be_released(device: CpuDevice, folder: Path) -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Enough

    for places in ((P, K, S, S), (K,) * 4, (S, P, P, P)):
        weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=0))
        with pytest.raises(Enough):
            weights.placement.move(plan_of(weights, places), progress)
        weights.release(device)
        assert device.budget.used == 0


def test_a_move_without_memory_is_refused_and_can_still_be_released(device: CpuDevice, folder: Path) -> None:
    weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=0, slots=1))
    device.budget.reserve("somebody else", device.budget.free - 1000)
    with pytest.raises(OutOfMemory, match=r"block 1 of m needs"):
        weights.placement.move(plan_of(weights, (P,) * 4))
    weights.release(device)
    device.budget.release("somebody else")


def test_a_broken_off_pass_begins_again(device: CpuDevice, folder: Path) -> None:
    weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=1, slots=2))
    placement = weights.placement
    for index in range(3):
        placement.begin(index)
        placement.prepare(index, 1)
        if index < 2:
            placement.end(index)
    placement.restart()
    placement.check_integrity()
    assert_as_in_the_checkpoint(weights, folder, passes=2)
    weights.release(device)


def test_release_frees_all_memory_and_unbinds_the_modules(device: CpuDevice, folder: Path) -> None:
    weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=2))
    weights.release(device)
    assert device.budget.used == 0 and weights.placement.nbytes == 0
    assert all(not held_by(block) for block in weights.skeleton.adapter.blocks)
