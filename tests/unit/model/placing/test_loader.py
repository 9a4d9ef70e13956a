from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, FalconConfig, PreTrainedConfig

from djinn_client.errors import DjinnError, InvalidRequest, ModelNotFound, ModelRejected, OutOfMemory
from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.model.placing.loader import ModelLoader, compute_dtype
from djinnd.model.placing.projections import Projection
from djinnd.model.tuning import SMALL_PARAMETERS
from djinnd.weights import layout
from djinnd.weights.plan import BlockPlace
from tests.support.checkpoints import Tensors, altered, cast, random_model
from tests.support.loaded import MEMORY, anonymous_arena, load_weights
from tests.support.models import FAMILIES, reduced_model
from tests.support.open_files import loader_of
from tests.support.placed import WatchedDevice, assert_as_in_the_checkpoint, tensors_of

UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    assert device.budget.used == 0, "a load has left something behind"
    device.close()


def quiet(stage: str, done: int, total: int) -> None:
    pass


# --- results of a load ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_a_buffer_of_its_own_block(device: CpuDevice, family: str) -> None:
    weights = load_weights(reduced_model(family), device)
    blocks, plan = weights.skeleton.adapter.blocks, weights.placement.plan
    assert plan is not None and plan.places == (BlockPlace.PLAIN,) * len(blocks)
    memories = [{tensor.untyped_storage().data_ptr() for tensor in tensors_of(block)} for block in blocks]
    assert all(len(memory) == 1 for memory in memories) and len(set.union(*memories)) == len(blocks)
    assert not any(p.is_meta for block in blocks for p in (*block.parameters(), *block.buffers()))
    assert not any(p.is_meta for p in (*weights.skeleton.model.parameters(), *weights.skeleton.model.buffers()))
    assert device.budget.used == weights.nbytes
    weights.release(device)


@pytest.mark.parametrize(
    ("family", "shared", "alone"), [("llama-2", 5, 2), ("qwen2", 5, 2), ("gpt-j", 3, 3), ("gpt2", 0, 0)]
)
def test_projections_of_one_input_are_one_product(device: CpuDevice, family: str, shared: int, alone: int) -> None:
    weights = load_weights(reduced_model(family), device)
    for block in weights.skeleton.adapter.blocks:
        products = Counter(module.product for module in block.modules() if isinstance(module, Projection))
        assert sum(count for count in products.values() if count > 1) == shared
        assert sum(count for count in products.values() if count == 1) == alone
    weights.release(device)


def test_the_count_of_parameters_equals_transformers(device: CpuDevice) -> None:
    weights = load_weights(reduced_model("gpt2"), device)
    embedding = 512 * 64 + 1024 * 64
    block = 4 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
    assert weights.parameters == embedding + 4 * block + 2 * 64
    weights.release(device)


def test_progress_reports_reading_and_uploading_to_the_end(device: CpuDevice) -> None:
    told: list[tuple[str, int, int]] = []
    loader = loader_of(reduced_model("llama-2"), device, "auto")
    weights = loader.run(anonymous_arena, lambda *progress: told.append(progress), 0)
    assert [stage for stage, _, _ in told] == ["reading"] * 5 + ["uploading"] * 4
    assert [(done, total) for stage, done, total in told if done == total] == [
        (loader.store.nbytes, loader.store.nbytes),
        (weights.placement.nbytes, weights.placement.nbytes),
    ]
    weights.release(device)


def test_a_filled_arena_is_not_read_again(device: CpuDevice, tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def keep(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
        memory, _ = anonymous_arena(nbytes, fingerprint)
        kept.append(memory)
        return memory, None

    folder = altered(tmp_path)
    first = loader_of(folder, device, "auto").run(keep, quiet, 0)
    again = loader_of(folder, device, "auto", name="n")
    stages: list[str] = []
    second = again.run(lambda nbytes, key: (kept[0], "ab" * 32), lambda stage, done, total: stages.append(stage), 0)
    assert set(stages) == {"uploading"}
    for weights in (first, second):
        assert_as_in_the_checkpoint(weights, folder, passes=1)
    assert first.rest is not None and second.rest is not None and torch.equal(first.rest, second.rest)
    first.release(device)
    second.release(device)


def test_the_fingerprint_depends_on_checkpoint_and_layout(
    device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = altered(tmp_path)
    loader = loader_of(folder, device, "auto")
    fingerprint = loader.fingerprint
    assert loader_of(folder, device, "auto").fingerprint == fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(layout, "SMALL_SHARE", 1.0)  # another order in buffers of the same sizes
        other = loader_of(folder, device, "auto")
        assert other.store.extents == loader.store.extents and other.fingerprint != fingerprint
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert loader_of(folder, device, "auto").fingerprint != fingerprint


def test_bf16_is_stored_unchanged_and_computed_in_float32_on_a_cpu(device: CpuDevice, tmp_path: Path) -> None:
    folder = altered(tmp_path, change=lambda tensors: cast(tensors, torch.bfloat16))
    loader = loader_of(folder, device, "auto")
    assert (loader.store.dtype, loader.dtype) == (torch.bfloat16, torch.float32)
    weights = loader.run(anonymous_arena, quiet, 0)
    assert weights.store.host(0).dtype == torch.bfloat16
    assert_as_in_the_checkpoint(weights, folder, passes=1)
    assert weights.rest is not None and torch.equal(weights.rest, weights.store.host(4).float())
    weights.release(device)


@pytest.mark.parametrize(
    ("wanted", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_the_requested_dtype_is_computed_in(device: CpuDevice, wanted: str, dtype: torch.dtype) -> None:
    assert compute_dtype(wanted, torch.bfloat16, device) == dtype


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)],
)
def test_only_large_models_in_bfloat16_are_computed_in_it_on_a_cpu(
    device: CpuDevice, stored: torch.dtype, dtype: torch.dtype
) -> None:
    assert compute_dtype("auto", stored, device, SMALL_PARAMETERS + 1) == dtype
    assert compute_dtype("auto", stored, device, SMALL_PARAMETERS) == torch.float32


def test_an_unknown_dtype_is_refused(device: CpuDevice) -> None:
    with pytest.raises(InvalidRequest, match="dtype 'int4' is not one of auto, float32, bfloat16, float16"):
        loader_of(reduced_model("llama-2"), device, "int4")


def test_an_unloaded_model_is_freed_without_the_garbage_collector() -> None:
    with closing(WatchedDevice(MEMORY)) as device:
        weights = load_weights(reduced_model("llama-2"), device)
        assert device.alive() == [*(f"block {index} of m" for index in range(4)), "rest of m"]
        gc.disable()
        try:
            weights.release(device)
            del weights
            assert device.alive() == []
        finally:
            gc.enable()


# --- failing loads --------------------------------------------------------------------------------------------------


def without_config(folder: Path) -> Path:
    return altered(folder) / "nowhere"


def config_of(text: str) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        (altered(folder) / "config.json").write_text(text)
        return folder

    return damage


def truncated(folder: Path) -> Path:
    file = altered(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    return folder


def changed(change: Callable[[Tensors], object], **config: object) -> Callable[[Path], Path]:
    return lambda folder: altered(folder, change=change, config=config)


def as_integers(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.int32)


def transposed(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].T.contiguous()


def of_family(config: PreTrainedConfig) -> Callable[[Path], Path]:
    return lambda folder: random_model(folder, config)


BLOOM = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
FALCON = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(without_config, ModelNotFound, "there is no such folder", id="none"),
        pytest.param(config_of("{"), ModelRejected, r"config\.json is not readable JSON", id="config"),
        pytest.param(config_of('{"model_type": "x"}'), ModelRejected, r"config\.json: model_type is 'x'", id="family"),
        pytest.param(config_of("{}"), ModelRejected, r"config\.json", id="no family"),
        pytest.param(truncated, ModelRejected, r"model\.safetensors is damaged or cut short", id="truncated"),
        pytest.param(changed(lambda t: t.pop(UP)), ModelRejected, rf"lacks tensor {UP}", id="missing"),
        pytest.param(changed(as_integers), ModelRejected, rf"tensor {UP} is I32", id="integers"),
        pytest.param(changed(transposed), ModelRejected, rf"{UP} has shape \[64, 160\].*needs \[160, 64\]", id="shape"),
        pytest.param(
            changed(len, num_key_value_heads=1), ModelRejected, r"layers\.\d\.self_attn\.[kv]_proj\.weight", id="heads"
        ),
        pytest.param(changed(len, num_hidden_layers=5), ModelRejected, r"lacks tensor model\.layers\.4\.", id="blocks"),
        pytest.param(of_family(BLOOM), ModelRejected, "block 0 of bloom never called .* attention", id="bloom"),
        pytest.param(of_family(FALCON), ModelRejected, "attention of falcon needs .*: alibi", id="falcon"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_the_fault(
    device: CpuDevice, tmp_path: Path, make: Callable[[Path], Path], error: type[DjinnError], message: str
) -> None:
    folder = make(tmp_path)
    with pytest.raises(error, match=message):
        load_weights(folder, device)
    assert device.budget.used == 0


def least(loader: ModelLoader) -> int:
    """The least device memory: one slot, embedding and head."""
    return max(size.least for size in loader.store.sizes(loader.dtype)) + loader.rest_bytes


def test_blocks_that_do_not_fit_stream_and_a_budget_below_one_slot_is_refused(device: CpuDevice) -> None:
    loader = loader_of(reduced_model("llama-2"), device, "auto")
    plan = loader.plan(MEMORY - least(loader))
    assert (plan.count(BlockPlace.STREAMED), plan.slots) == (4, 1)
    needed = MEMORY + 1
    message = r"m needs at least 1\.01 GiB of device memory, and 1\.00 GiB of the budget of 1\.00 GiB is free: .* KV"
    with pytest.raises(OutOfMemory, match=message) as told:
        loader.plan(needed - least(loader))
    assert told.value.data == {"needed": needed, "free": MEMORY, "budget": MEMORY}


def test_a_plan_may_be_made_for_another_budget(device: CpuDevice) -> None:
    loader = loader_of(reduced_model("llama-2"), device, "auto")
    assert loader.plan(0).count(BlockPlace.PLAIN) == 4
    assert loader.plan(100, free=least(loader) + 100).count(BlockPlace.STREAMED) == 4
    with pytest.raises(OutOfMemory) as told:
        loader.plan(100, free=least(loader))
    assert told.value.data["needed"] == least(loader) + 100


def test_a_load_that_runs_out_of_memory_gives_its_memory_back(device: CpuDevice) -> None:
    loader = loader_of(reduced_model("llama-2"), device, "auto")

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "uploading" and done < total / 2:
            device.budget.reserve("somebody else", device.budget.free)

    with pytest.raises(OutOfMemory, match="block 1 of m needs"):
        loader.run(anonymous_arena, progress, 0)
    device.budget.release("somebody else")


def test_without_device_memory_no_host_memory_is_requested(device: CpuDevice) -> None:
    loader = loader_of(reduced_model("llama-2"), device, "auto")
    device.budget.reserve("somebody else", MEMORY - least(loader) + 1)

    def arena(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
        raise AssertionError("the host was asked for memory")

    with pytest.raises(OutOfMemory, match=r"m needs at least"):
        loader.run(arena, quiet, 0)
    device.budget.release("somebody else")


@pytest.mark.parametrize("stage", ["reading", "uploading"])
def test_an_exception_of_progress_ends_the_load(device: CpuDevice, stage: str) -> None:
    class Enough(Exception):
        pass

    def progress(told: str, done: int, total: int) -> None:
        if told == stage:
            raise Enough

    with pytest.raises(Enough):
        loader_of(reduced_model("llama-2"), device, "auto").run(anonymous_arena, progress, 0)


def test_an_exception_of_the_arena_ends_the_load(device: CpuDevice) -> None:
    def refuse(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
        raise OutOfMemory(f"/dev/shm has no {nbytes} bytes")

    with pytest.raises(OutOfMemory, match="/dev/shm"):
        loader_of(reduced_model("llama-2"), device, "auto").run(refuse, quiet, 0)


def test_more_blocks_than_tensors_are_refused_before_a_module_is_built(tmp_path: Path, device: CpuDevice) -> None:
    folder = altered(tmp_path, config={"num_hidden_layers": 1000})
    with pytest.raises(ModelRejected, match=r"says 1,000 blocks, but the checkpoint has only \d+ tensors"):
        loader_of(folder, device, "auto")


# --- packing --------------------------------------------------------------------------------------------------------


def zeroed(tensors: Tensors) -> None:
    """Makes two blocks that can be packed, then one that cannot."""
    for name, tensor in tensors.items():
        tensors[name] = (0 * tensor if ".layers.2." in name and "proj" in name else tensor).to(torch.bfloat16)


def test_weights_that_cannot_be_packed_stay_plain_and_the_notes_say_why(device: CpuDevice, tmp_path: Path) -> None:
    folder = altered(tmp_path, change=zeroed)
    asked: list[int] = []

    def arena(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
        asked.append(nbytes)
        return anonymous_arena(nbytes, fingerprint)

    loader = loader_of(folder, device, "bfloat16", Placing(resident=2))
    packed = loader.fingerprint
    weights = loader.run(arena, quiet, 0)
    assert len(asked) == 2 and asked[0] < asked[1] == weights.store.nbytes
    assert not weights.store.is_packed and loader.fingerprint != packed
    (note,) = weights.notes
    assert note.startswith("blocks stay plain: ") and "lie outside of their unit's 16 exponents" in note
    assert_as_in_the_checkpoint(weights, folder, passes=2)
    weights.release(device)


def test_a_packed_block_equals_the_checkpoint_to_the_bit(device: CpuDevice, tmp_path: Path) -> None:
    folder = altered(tmp_path, change=lambda tensors: cast(tensors, torch.bfloat16))
    weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=0))
    plain = load_weights(folder, device, "bfloat16", name="plain", placing=Placing(packing=False))
    for index, form in enumerate(weights.store.forms[:-1]):
        assert form is not None
        packed = torch.zeros(form.nbytes, dtype=torch.uint8)
        used = weights.store.travelling(index)
        packed[: len(used)] = used
        decoded = torch.zeros(form.numel, dtype=torch.bfloat16)
        form.unpack(packed, decoded)
        wanted = plain.store.buffers[index].layout.views(plain.store.host(index))
        for name, view in weights.store.buffers[index].layout.views(decoded).items():
            assert torch.equal(view.view(torch.int16), wanted[name].view(torch.int16)), name
    weights.release(device)
    plain.release(device)


@pytest.mark.parametrize("stage", ["reading", "uploading"])
def test_a_packed_load_that_is_broken_off_leaves_nothing(device: CpuDevice, tmp_path: Path, stage: str) -> None:
    class Enough(Exception):
        pass

    def progress(told: str, done: int, total: int) -> None:
        if told == stage:
            raise Enough

    folder = altered(tmp_path, change=lambda tensors: cast(tensors, torch.bfloat16))
    with pytest.raises(Enough):
        loader_of(folder, device, "bfloat16", Placing(resident=3)).run(anonymous_arena, progress, 0)
    weights = load_weights(folder, device, "bfloat16")
    weights.release(device)
