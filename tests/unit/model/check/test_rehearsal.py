"""The list of kernels is complete: it has all kernels that steps of a model launch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from djinnd.device.cpu import CpuDevice
from djinnd.model.attention.latent_kernels import LatentKernels
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.check.rehearsal import list_kernels
from djinnd.model.fast.router import fuse_routers
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.launches import Launches
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.kernels.launching.variants import Variant
from djinnd.model.paged_batch import Softmax
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHUNK_TOKENS, DECODE_ROWS
from tests.families.configurations import reduced
from tests.support.checkpoints import random_model
from tests.support.compiled import hopper
from tests.support.loaded import MEMORY, load_weights, paged_model
from tests.support.models import reduced_model
from tests.support.parameters import long_except

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches would run"),
]
MAX_TOKENS, MAX_KV = 512, 4096
CPU = torch.device("cpu")


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("djinnd.model.kernels.launching.scratch.processors", lambda device: 132)
    with hopper() as launches:
        yield launches


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


def model_of(family: str, device: CpuDevice) -> PagedModel:
    return with_kernels(reduced_model(family), device)


def with_kernels(folder: Path, device: CpuDevice) -> PagedModel:
    """A model with the attention of a GPU."""
    weights = load_weights(folder, device)
    model = paged_model(weights, 2, 16)
    model.context.kernels = TritonAttention(torch.device("cpu"))
    return model


def step(model: PagedModel, device: CpuDevice, tokens: int, rows: int, max_query: int, max_kv: int) -> None:
    inputs = StepInputs(device, tokens, rows, 1)
    inputs.pad(0, 0, 0)
    inputs.send()
    with device.computing(), torch.inference_mode():
        model.forward(inputs, inputs.paged_batch(max_query=max_query, max_kv=max_kv, fresh=False))


@pytest.mark.parametrize("family", long_except(("gemma-2",), ("llama-2", "gemma-2", "gpt-oss")))
def test_steps_launch_only_listed_kernels(family: str, launches: Launches, device: CpuDevice) -> None:
    model = model_of(family, device)
    listed = set(list_kernels(model, MAX_TOKENS, MAX_KV))
    with launches.listing() as launched:
        for max_kv in (16, 300, 1500, MAX_KV):
            for rows in DECODE_ROWS[::3]:
                step(model, device, rows, rows, 1, max_kv)
            for tokens in [*CHUNK_TOKENS[:9:2], 9, MAX_TOKENS]:
                for queries in {2, 5, 8, 9, tokens}:
                    step(model, device, tokens, min(tokens, 4), queries, max_kv)
    assert set(launched) <= listed
    names = {variant.name for variant in listed}
    mixed = {"chunks_kernel", "singles_kernel", "combine_mixed_kernel"}
    assert names == mixed | {"kv_write_kernel", "decode_kernel", "combine_kernel"}


def test_steps_of_latent_attention_launch_only_listed_kernels(
    launches: Launches, device: CpuDevice, tmp_path: Path
) -> None:
    model = with_kernels(random_model(tmp_path / "model", reduced("deepseek_v3")), device)
    assert model.latents and all(latents.can_be_absorbed for latents in model.latents)
    listed = set(list_kernels(model, MAX_TOKENS, MAX_KV))
    with launches.listing() as launched, torch.inference_mode():
        for max_kv in (16, 300, 1500, MAX_KV):
            for rows in DECODE_ROWS[::3]:
                step(model, device, rows, rows, 1, max_kv)
            for queries in (2, 5, 8):
                step(model, device, 16, 2, queries, max_kv)
        kernels = LatentKernels(
            (model.paged[0].keys, model.paged[0].values), Softmax(0.1), model.latents[0], Scratch(CPU)
        )
        for length in (64, 300, 600, 1500, MAX_KV):
            for queries in (9, 60, MAX_TOKENS):
                q = torch.zeros(queries, 4, 24)
                kernels.many(q, torch.zeros(-(-length // model.page_size), dtype=torch.int32), length)
    assert set(launched) <= listed
    attention = {"latent_kernel", "combine_kernel", "chunks_kernel", "singles_kernel", "combine_mixed_kernel"}
    assert {variant.name for variant in listed} == attention | {"kv_write_kernel"}


def test_routers_kernels_are_listed_and_a_skipped_one_picks_experts_that_exist(
    launches: Launches, device: CpuDevice
) -> None:
    """The family's own experts run here, and fail for picks outside of them."""
    model = model_of("gpt-oss", device)
    blocks = model.skeleton.adapter.blocks
    fuse_routers(blocks, model.dtype)
    picked: list[Tensor] = []
    for block in blocks:
        block.mlp.router.register_forward_hook(lambda router, given, result: picked.append(result[2].clone()))
    torch.use_deterministic_algorithms(True)  # fills torch.empty with the largest number
    try:
        listed = list_kernels(model, MAX_TOKENS, MAX_KV)
        with launches.listing() as launched:
            for rows in (1, 2, 17):
                step(model, device, rows, rows, 1, 16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {len(each) for each in picked} >= {1, 8, 17, MAX_TOKENS} and not torch.cat(picked).any()
    routing = [variant for variant in launched if variant.name == "route_kernel"]
    assert len(routing) == 1 and set(launched) <= set(listed)


def windows(listed: list[Variant]) -> set[bool]:
    return {"WINDOW=0" not in str(variant) for variant in listed if variant.name == "decode_kernel"}


@pytest.mark.parametrize(("family", "kinds"), [("llama-2", {False}), ("gemma-2", {False, True})])
def test_kernels_of_each_kind_of_block_are_listed(
    family: str, kinds: set[bool], launches: Launches, device: CpuDevice
) -> None:
    assert windows(list_kernels(model_of(family, device), MAX_TOKENS, MAX_KV)) == kinds


def test_a_listing_reads_no_uninitialised_memory(
    launches: Launches, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that sends a step's inputs may be missing itself: its launch is then listed and skipped."""
    model = model_of("llama-2", device)
    monkeypatch.setattr(StepInputs, "send_sealed", lambda self: None)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with ones: token ids of -1
    try:
        assert list_kernels(model, MAX_TOKENS, MAX_KV)
    finally:
        torch.use_deterministic_algorithms(False)


def test_after_a_failure_there_is_a_list_and_attention_is_restored(launches: Launches, device: CpuDevice) -> None:
    model = model_of("llama-2", device)
    own = model.context.kernels

    def fails(*args: object, **arguments: object) -> None:
        raise ValueError("of the family")

    model.adapter.blocks[1].forward = fails  # type: ignore[method-assign]
    assert list_kernels(model, MAX_TOKENS, MAX_KV)
    assert model.context.kernels is own
