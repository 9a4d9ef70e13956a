"""Compares streamed and packed blocks on a CUDA device, with captured graphs, with the same blocks plain and
resident."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.errors import OutOfMemory
from djinn_client.protocol import Placing
from djinn_client.protocol.fields.placing import Quantise
from djinnd.device.cuda import CudaDevice
from djinnd.engine.budgeting import change_budget
from djinnd.model.placing import beside_bus
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.plan import BlockPlace
from tests.support import quantised as by
from tests.support import reference
from tests.support.beside import ROWS, host_takes, rows_on_host
from tests.support.checkpoints import altered, cast, random_model
from tests.support.cuda import CUDA_MEMORY, cuda_device
from tests.support.loaded import Served, load_weights, random_prompt
from tests.support.models import reduced_model
from tests.support.placed import assert_as_in_the_checkpoint, plan_of

pytestmark = pytest.mark.gpu

FOLDER = reduced_model("llama-3.1")
FEW, MANY = PACKED_ROWS - 5, PACKED_ROWS + 4  # rows that products read packed weights for, and more rows
INT8_ROWS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}},
}
PLACES = {
    "packed, two stream": Placing(resident=2),
    "packed, all stream": Placing(resident=0),
    "packed, all stream in one slot, in pieces": Placing(resident=0, slots=1, piece_bytes=1 << 16),
    "packed, all stream without prefetch": Placing(resident=0, prefetch=False),
    "plain, all stream": Placing(resident=0, packing=False),
    "plain, three stream in two slots": Placing(resident=1, slots=2, packing=False),
}


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with cuda_device() as device:
        yield device


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "m"
    return altered(folder, "llama-3.1", lambda tensors: cast(tensors, torch.bfloat16))


def tell(served: Served, rows: int, *, captured: bool) -> tuple[Tensor, list[list[int]], list[object]]:
    """Logits of a prompt, then the tokens and log probabilities of `rows` sessions that step together."""
    runner = served.runner
    if captured:
        while runner.graphs.capture_next():
            pass
    else:
        runner.graphs.drop()
    reader = served.open()
    forward = served.submit(reader, random_prompt(50, 512, 9))
    served.run()
    logits = served.logits_of(forward)
    sessions = [served.open() for _ in range(rows)]
    for seed, session in enumerate(sessions):
        served.submit(session, random_prompt(12, 512, seed), max_tokens=8, logprobs=5)
    seen: list[object] = []
    while (batch := served.scheduler.next_batch()) is not None:
        sampled = runner.run(batch)
        seen += sampled.logprobs
        served.complete(batch, sampled)
        runner.settle()
        runner.model.placement.check_integrity()
    assert not captured or (runner.graphs.current is not None and runner.graphs.current._captured)
    return logits, [session.tokens for session in sessions], seen


def told(
    device: CudaDevice, folder: Path, dtype: str, placing: Placing, rows: int, *, captured: bool, packed: bool = False
) -> tuple[Tensor, list[list[int]], list[object]]:
    with Served(folder, device, dtype=dtype, placing=placing, max_batch_tokens=256) as served:
        if packed:
            served.runner.move(plan_of(served.runner.weights, (BlockPlace.PACKED,) * 4), served.runner.plan.num_pages)
        return tell(served, rows, captured=captured)


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_streamed_blocks_give_the_bits_of_resident_plain_ones(
    device: CudaDevice, sixteen_bit: Path, dtype: str, rows: int, captured: bool
) -> None:
    """Batches have the same shape. Resident blocks of these plans are plain, because there is memory for them."""
    wanted = told(device, sixteen_bit, dtype, Placing(packing=False), rows, captured=captured)
    for name, placing in PLACES.items():
        got = told(device, sixteen_bit, dtype, placing, rows, captured=captured)
        assert torch.equal(got[0], wanted[0]), name
        assert got[1:] == wanted[1:], name
        assert device.budget.used == device.reserved


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("rows", [3, MANY])
def test_streamed_experts_in_a_code_give_the_bits_of_resident_ones(
    device: CudaDevice, tmp_path: Path, rows: int, captured: bool
) -> None:
    """The picked experts are copied as they are stored, and kernels multiply by their codes in both places."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "head_dim": 32, "vocab_size": 512, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = GptOssConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2)
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    model = random_model(tmp_path / "m", config)
    folder = by.write_quantised(tmp_path / "q", by.mxfp4_experts, quantised, model, "_proj")
    found = []
    for resident in (4, 0, 2):
        placing = Placing(resident=resident, packing=False)
        with Served(folder, device, dtype="bfloat16", placing=placing, max_batch_tokens=256) as served:
            plan = served.runner.places
            if resident == 4:
                plan = plan_of(served.runner.weights, (BlockPlace.PACKED,) * 4, decodes_experts=False)
                served.runner.move(plan, served.runner.plan.num_pages)
            assert not plan.decodes_experts and len(plan.streamed) == 4 - resident
            found.append(tell(served, rows, captured=captured))
    for got in found[1:]:
        assert torch.equal(got[0], found[0][0]) and got[1:] == found[0][1:]
    assert found[0][0].std() > 0


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("mlps", [1, 3])
def test_mlps_on_the_host_give_the_tokens_of_transformers(
    device: CudaDevice, mlps: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt by the bus, then steps of ROWS - 1 rows, which graphs pad to ROWS - 1 or more."""
    host_takes(monkeypatch, mlps)
    placing = Placing(resident=1, slots=2, cpu_beside_bus=True)
    with Served(FOLDER, device, dtype="float32", placing=placing, max_batch_tokens=256) as served:
        on_host = rows_on_host(monkeypatch)
        _, sessions, _ = tell(served, ROWS - 1, captured=captured)
        assert ROWS - 1 in on_host
    for seed, tokens in enumerate(sessions):
        prompt = random_prompt(12, 512, seed)
        assert tokens[12:] == reference.greedy(FOLDER, prompt, 8, tokens[12:])


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("form", ["rows", "at load"])
def test_int8_mlps_on_the_host_give_the_tokens_of_the_bus(
    device: CudaDevice, form: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint with a scale for each row, and groups of 128 columns that the load quantises."""
    host_takes(monkeypatch, 2)
    is_made = form == "at load"
    folder = FOLDER if is_made else by.write_quantised(tmp_path / "m", by.int8_rows, INT8_ROWS, "llama-3.1")
    on_host, found = rows_on_host(monkeypatch), []
    for beside in (False, True):
        placing = Placing(resident=1, slots=2, quantise="int8" if is_made else "", cpu_beside_bus=beside)
        with Served(folder, device, dtype="float32", placing=placing, max_batch_tokens=256) as served:
            on_host.clear()
            found.append(tell(served, ROWS - 1, captured=captured)[1])
        assert on_host.count(ROWS - 1) >= 2 * 5 * beside and bool(on_host) == beside
    assert found[0] == found[1]


@pytest.mark.parametrize("quantise", ["", "int8"])
def test_mlps_of_packed_and_coded_blocks_on_the_host_pass_the_check_at_load(
    device: CudaDevice, quantise: Quantise, sixteen_bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its single steps compare each block with a pass by the bus. Here the rates are measured, too."""
    on_host = rows_on_host(monkeypatch)
    monkeypatch.setattr(beside_bus, "best_share", lambda streamed, rates, most: most)
    monkeypatch.setattr(beside_bus, "most_rows", lambda streamed, rates, mlps: ROWS)
    placing = Placing(resident=0, quantise=quantise, cpu_beside_bus=True)
    with Served(sixteen_bit, device, dtype="bfloat16", placing=placing, max_batch_tokens=256) as served:
        on_host.clear()
        tell(served, 1, captured=True)
        assert len(on_host) >= 4 * 5
    assert device.budget.used == device.reserved


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
def test_resident_packed_blocks_give_the_bits_of_plain_ones_for_many_rows(
    device: CudaDevice, sixteen_bit: Path, captured: bool
) -> None:
    wanted = told(device, sixteen_bit, "bfloat16", Placing(packing=False), MANY, captured=captured)
    got = told(device, sixteen_bit, "bfloat16", Placing(), MANY, captured=captured, packed=True)
    assert torch.equal(got[0], wanted[0]) and got[1:] == wanted[1:]


@pytest.mark.parametrize("rows", [1, 3, PACKED_ROWS])
def test_resident_packed_blocks_differ_from_plain_ones_only_in_the_order_of_sums_for_few_rows(
    device: CudaDevice, sixteen_bit: Path, rows: int
) -> None:
    tokens = random_prompt(rows, 512, 3)
    found = []
    for packed in (False, True):
        with Served(sixteen_bit, device, dtype="bfloat16") as served:
            if packed:
                plan = plan_of(served.runner.weights, (BlockPlace.PACKED,) * 4)
                served.runner.move(plan, served.runner.plan.num_pages)
            session = served.open()
            request = served.submit(session, tokens)
            served.run()
            found.append(served.logits_of(request))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert error.item() < 0.02


@pytest.mark.parametrize("placing", [Placing(), Placing(resident=2), Placing(resident=0, slots=1)], ids=str)
def test_blocks_on_the_device_equal_the_checkpoint_to_the_bit(
    device: CudaDevice, sixteen_bit: Path, placing: Placing
) -> None:
    """Blocks are packed on the device, copied over the bus and unpacked there, and moved between all places."""
    weights = load_weights(sixteen_bit, device, "bfloat16", placing=placing)
    with device.computing(), torch.inference_mode():
        assert_as_in_the_checkpoint(weights, sixteen_bit, passes=3)
        P, K, S = BlockPlace.PLAIN, BlockPlace.PACKED, BlockPlace.STREAMED
        for places in ((K, K, K, K), (S, P, S, K), (P, P, P, P), (K, S, P, S)):
            weights.placement.move(plan_of(weights, places))
            assert_as_in_the_checkpoint(weights, sixteen_bit, passes=2)
            assert device.budget.used == device.reserved + weights.nbytes
    weights.release(device)


def test_a_broken_off_pass_begins_again_with_graphs(device: CudaDevice, sixteen_bit: Path) -> None:
    wanted = told(device, sixteen_bit, "bfloat16", Placing(packing=False), FEW, captured=True)
    with Served(sixteen_bit, device, dtype="bfloat16", placing=Placing(resident=1), max_batch_tokens=256) as served:
        placement = served.runner.model.placement
        with device.computing():
            for index in range(3):
                placement.begin(index)
                if index < 2:
                    placement.end(index)
        served.runner.recover()
        got = tell(served, FEW, captured=True)
    assert torch.equal(got[0], wanted[0]) and got[1:] == wanted[1:]


def test_host_memory_is_pinned_as_long_as_it_is_needed(device: CudaDevice, sixteen_bit: Path) -> None:
    weights = load_weights(sixteen_bit, device, "bfloat16")
    pieces = weights.store.pieces()
    assert len(pieces) == 5 and all(piece.is_pinned() for piece in pieces)
    weights.release_host(device)
    assert not any(piece.is_pinned() for piece in pieces) and not weights.store.is_attached
    weights.release(device)
    weights = load_weights(sixteen_bit, device, "bfloat16", placing=Placing(resident=0))
    pieces = weights.store.pieces()
    assert all(piece.is_pinned() for piece in pieces)
    weights.release(device)
    assert not any(piece.is_pinned() for piece in pieces)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # where its memory does not suffice for any
@pytest.mark.parametrize("seed", range(2))
def test_sixteen_sessions_get_their_tokens_while_the_budget_changes(device: CudaDevice, seed: int) -> None:
    """Runs in float32, with graphs that are captured again after each change."""
    chance = random.Random(seed)
    texts = [random_prompt(chance.randint(1, 200), 512, number) for number in range(16)]
    with Served(FOLDER, device, dtype="float32", max_batch_tokens=128) as served:
        sessions = [served.open() for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            served.submit(session, text, max_tokens=24)
        with pytest.raises(OutOfMemory) as told:
            change_budget(device, [served.runner], served.scheduler, 1)
        least = told.value.data["needed"]
        streamed = set()
        while served.step() is not None:
            if chance.random() < 0.2:
                total = least + chance.choice([0, 1 << 19, 1 << 20, 1 << 24, CUDA_MEMORY - least])
                change_budget(device, [served.runner], served.scheduler, total)
                device.budget.check_integrity()
                assert device.budget.used == device.reserved + served.runner.nbytes <= device.budget.total == total
                streamed.add(len(served.runner.places.streamed))
        assert len(streamed) > 1
        for session, text in zip(sessions, texts, strict=True):
            assert session.tokens == text + reference.greedy(FOLDER, text, 24)
        change_budget(device, [served.runner], served.scheduler, CUDA_MEMORY)


# --- the device's part ----------------------------------------------------------------------------------------------


def test_a_copy_waits_for_the_mark_and_compute_for_the_copy(device: CudaDevice) -> None:
    region = device.allocate("region", (1 << 20,), torch.int32, zero=True)
    sources = [torch.full((1 << 20,), number, dtype=torch.int32).pin_memory() for number in range(1, 9)]
    found = []
    mark = None
    for source in sources:
        device.copy(region, source, mark).order()
        with device.computing():
            torch.cuda._sleep(10_000_000)
            found.append(region.clone())
            mark = device.mark()
    device.synchronize()
    assert [int(copy.min()) for copy in found] == [int(copy.max()) for copy in found] == list(range(1, 9))
    device.release("region")


def test_work_aside_is_complete_at_its_end_and_waits_for_no_other_stream(device: CudaDevice) -> None:
    with device.computing():
        torch.cuda._sleep(1_000_000_000)
    with device.side_stream():
        there = torch.ones(1 << 20, device=device.torch_device)
        doubled = there * 2
    busy = not device.compute_stream.query()
    assert busy, "the work aside has waited for the compute stream"
    device.synchronize()
    assert bool((doubled == 2).all())


def test_rates_are_plausible_and_leave_no_memory(device: CudaDevice) -> None:
    with device.side_stream():  # where cuBLAS takes a workspace at its first product, and keeps it
        side = torch.ones(64, 64, device=device.torch_device, dtype=torch.bfloat16)
        side @ side
    del side
    device.trim()
    before = torch.cuda.memory_reserved()
    rates = device.rates()
    assert 1e9 < rates.bus < 1e12 < min(rates.products.values()) and rates.bus < rates.memory < 2e13
    assert rates.bus < rates.reading < 2e13 and 1e-7 < rates.launch < 1e-4
    assert torch.cuda.memory_reserved() == before and device.rates() is rates


def test_the_allocator_keeps_to_a_budget_that_has_changed(device: CudaDevice) -> None:
    more = (1 << 30) + (128 << 20) + (2 << 20)  # than a budget of 1 GiB, and what the allocator has beside it
    device.resize(device.reserved + (1 << 30))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(more, dtype=torch.uint8, device=device.torch_device)
    device.resize(device.reserved + (2 << 30))
    torch.empty(more, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(OutOfMemory, match="more than now"):
        device.resize(1 << 50)
    assert device.budget.total == device.reserved + (2 << 30)
