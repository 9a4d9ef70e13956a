"""Kernels that fetch experts from pinned host memory: alone, in a captured graph, and in whole models."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.handover.packed import PackedForm
from djinn_client.protocol.fields.placing import Placing
from djinnd.device.cuda import CudaDevice
from djinnd.model.kernels.host_memory.fetch import fetch_packed
from djinnd.weights.plan import BlockPlace
from tests.support.checkpoints import altered, cast
from tests.support.cuda import cuda_device
from tests.support.expert_fetches import FetchCounter
from tests.support.fetched import check_packed, check_plain, picks
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.packed import ODD, form_of, packed, weights
from tests.support.placed import plan_of

pytestmark = pytest.mark.gpu

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss")
SHAPES = [(4 * 1000, 384), (4 * 6, 64), (4 * 129, 1152)]
STRANGE = [*ODD, float("inf"), float("-inf"), float("nan")]


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    with cuda_device() as device:
        yield device


@pytest.fixture(scope="module", params=FAMILIES)
def in_bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "m"
    return altered(folder, request.param, lambda tensors: cast(tensors, torch.bfloat16))


class Pinned:
    """A copy in host memory of its own, which is registered with the device like the arena."""

    def __init__(self, device: CudaDevice, tensor: Tensor) -> None:
        self._device = device
        nbytes = -(-tensor.nbytes // 4096) * 4096
        self._memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        device.pin([self._memory])
        self.tensor = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *error: object) -> None:
        self._device.synchronize()
        self._device.unpin([self._memory])


@pytest.mark.parametrize("picked", [[], [0], [1, 3], [0, 1, 2, 3]], ids=str)
def test_experts_are_fetched_from_host_and_from_device_memory(device: CudaDevice, picked: list[int]) -> None:
    torch.manual_seed(0)
    form = form_of(SHAPES)
    plain = weights(form, STRANGE)
    buffer = packed(form, plain)
    check_packed(form, plain, buffer.cuda(), picked, "cuda")
    stack = plain[: form.units[0].weights].view(4, 1000, 384)
    with Pinned(device, buffer) as here, Pinned(device, stack) as there:
        check_packed(form, plain, here, picked, "cuda")
        check_plain(there, picked, "cuda")


def test_a_replay_fetches_the_experts_that_are_picked_at_that_time(device: CudaDevice) -> None:
    torch.manual_seed(0)
    form = form_of(SHAPES)
    plain = weights(form, STRANGE)
    out = torch.zeros(form.numel, dtype=torch.bfloat16, device="cuda")
    picked = picks([0], 4, "cuda")
    with Pinned(device, packed(form, plain)) as source:
        fetch_packed(picked, form, source, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fetch_packed(picked, form, source, out)
        for experts in ([2], [1, 3], []):
            picked.copy_(picks(experts, 4))
            out.zero_()
            graph.replay()
            check_only(form, out, plain, experts)


def check_only(form: PackedForm, out: Tensor, plain: Tensor, experts: list[int]) -> None:
    for unit in form.units:
        got, wanted = (t.cpu()[unit.offset :][: unit.weights].view(4, -1).view(torch.int16) for t in (out, plain))
        assert all(torch.equal(got[e], wanted[e] if e in experts else 0 * wanted[e]) for e in range(4))


def serve(folder: Path, device: CudaDevice, placing: Placing, place: BlockPlace | None = None) -> Served:
    served = Served(folder, device, dtype="bfloat16", plan=small_pages(60), max_batch_tokens=64, placing=placing)
    if place is not None:
        served.runner.weights.placement.move(plan_of(served.runner.weights, [place] * 4))
    return served


def answers(served: Served) -> tuple[list[Tensor], list[list[int]]]:
    """Logits of prompts, which run eagerly, and generated tokens, most of them by graphs."""
    with served:
        requests = [served.submit(served.open(), random_prompt(length, 512, 1)) for length in (1, 40, 90)]
        served.run()
        logits = [served.logits_of(request) for request in requests]
        tokens = []
        for length in (1, 33, 20):
            session = served.open()
            served.submit(session, random_prompt(length, 512, 2), max_tokens=24)
            served.run()
            tokens.append(session.tokens[length:])
        assert served.runner.graphs.current is not None and served.runner.graphs.current._captured
        return logits, tokens


@pytest.mark.parametrize("places", ["streamed packed", "streamed plain", "1 resident"])
def test_logits_and_tokens_are_those_of_resident_blocks(in_bf16: Path, device: CudaDevice, places: str) -> None:
    resident = answers(serve(in_bf16, device, Placing()))
    placing = Placing(resident=1 if places == "1 resident" else 0, packing=places != "streamed plain")
    served = serve(in_bf16, device, placing)
    assert served.runner.places.notes == ["experts on demand: 2 of 4"]
    logits, tokens = answers(served)
    assert all(torch.equal(one, other) for one, other in zip(logits, resident[0], strict=True))
    assert tokens == resident[1]


def test_resident_packed_blocks_round_otherwise_than_plain_ones_for_few_rows_only(
    in_bf16: Path, device: CudaDevice
) -> None:
    """Attention multiplies one row by packed weights, and the router's are decoded. Many rows are multiplied by plain
    weights."""
    found = []
    for place in (BlockPlace.PLAIN, BlockPlace.PACKED):
        with serve(in_bf16, device, Placing(), place) as served:
            for length in (1, 40):
                request = served.submit(served.open(), random_prompt(length, 512, 3))
                served.run()
                found.append(served.logits_of(request))
    one, many, one_packed, many_packed = found
    assert torch.equal(many_packed, many)
    assert float((one_packed - one).norm() / one.norm()) < 0.1


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_a_replayed_step_moves_only_the_picked_experts(
    in_bf16: Path, device: CudaDevice, packing: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions with equal tokens pick equal experts. The graph for three sessions has a fourth row of padding."""
    fetches = FetchCounter(monkeypatch)
    with serve(in_bf16, device, Placing(resident=0, packing=packing)) as served:
        sessions = [served.open() for _ in range(count)]
        for session in sessions:
            served.submit(session, random_prompt(1, 512, 2), max_tokens=20)
        while len(sessions[-1].tokens) < 6:
            served.step()
        device.synchronize()
        before = fetches.total()
        for _ in range(5):
            served.step()
        device.synchronize()
        mixtures = sum(size.experts is not None for size in served.runner.places.sizes)
        assert fetches.total() - before == 5 * 2 * mixtures
        served.run()
