"""Experts on demand: which families have them, that only picked experts are copied, and that results are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from djinn_client.protocol.fields.placing import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.engine.run.model_info import info_of
from djinnd.model.family.experts import find_stack
from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.step.inputs import StepInputs
from djinnd.weights.plan import BlockPlace
from djinnd.weights.store import Routing
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import altered, cast
from tests.support.expert_fetches import FetchCounter
from tests.support.loaded import MEMORY, Served, fill, load_weights, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.parameters import long_except
from tests.support.placed import assert_as_in_the_checkpoint, plan_of

# Families with experts [out, in]; beside a dense block; [in, out] with biases.
FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss")
SEED = 3
PLACES = {"P": BlockPlace.PLAIN, "K": BlockPlace.PACKED, "S": BlockPlace.STREAMED}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=long_except(("gpt-oss",), FAMILIES))
def in_bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "m"
    return altered(folder, request.param, lambda tensors: cast(tensors, torch.bfloat16))


def skeleton_of(family: str, **changed: Any) -> Skeleton:
    return Skeleton(build(AutoConfig.from_pretrained(reduced_model(family), **changed), torch.float32))


def prompt(length: int, seed: int = SEED) -> list[int]:
    return random_prompt(length, 512, seed)


def experts_of(served: Served) -> Iterator[tuple[int, nn.Module]]:
    """The modules with the experts of streamed blocks."""
    for index in served.runner.places.streamed:
        stack = served.runner.weights.skeleton.stacks[index]
        if stack is not None:
            yield index, served.runner.model.adapter.blocks[index].get_submodule(stack.names[0].rpartition(".")[0])


class Picked:
    """Records the experts that calls of streamed blocks pick."""

    def __init__(self, served: Served) -> None:
        self.calls: list[tuple[int, set[int]]] = []
        self._hooks = [
            module.register_forward_pre_hook(lambda _, args, index=index: self._note(index, args))
            for index, module in experts_of(served)
        ]

    def _note(self, block: int, args: tuple[Tensor, ...]) -> None:
        self.calls.append((block, set(args[1].flatten().tolist())))


def test_the_number_of_picked_experts_is_learnt_from_the_family(family: str) -> None:
    stacks = skeleton_of(family).stacks
    assert [stack is None for stack in stacks] == [False, family == "qwen3-moe", False, False]
    for stack in stacks:
        assert stack is None or stack.routing == Routing(count=4, picked=2)
        assert stack is None or {name.rpartition(".")[2] for name in stack.names} == {"gate_up_proj", "down_proj"}


def test_experts_that_are_all_picked_are_not_a_stack(family: str) -> None:
    assert skeleton_of(family, num_experts_per_tok=4).stacks == [None] * 4
    assert skeleton_of(family, num_experts_per_tok=1).stacks[0].routing.picked == 1  # type: ignore[union-attr]


def test_dense_families_have_no_stack() -> None:
    assert skeleton_of("llama-3.1").stacks == [None] * 4


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_experts_beside_a_convolution_are_a_stack(family: str) -> None:
    """A block with a state has a convolution. Its weights have three dimensions, as a stack of experts has."""
    stacks = Skeleton(build(reduced(family), torch.float32)).stacks
    assert all(stack is not None and stack.routing == Routing(count=4, picked=2) for stack in stacks)


def test_experts_that_cannot_be_unpacked_alone_are_not_a_stack() -> None:
    assert skeleton_of("mixtral", intermediate_size=97).stacks == [None] * 4


class Odd(nn.Module):
    """A mixture that calls its experts with unusual arguments."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.stacked = nn.Parameter(torch.empty(4, 128, 64, device="meta"))
        self.arguments = arguments

    def forward(self, hidden: Tensor) -> None:
        self.experts(hidden, *self.arguments)


@pytest.mark.parametrize(
    "arguments", [(), (torch.zeros(2, dtype=torch.long),), (torch.zeros(2, 2, dtype=torch.int),) * 2]
)
def test_experts_with_other_arguments_are_not_a_stack(arguments: tuple[Tensor, ...]) -> None:
    mixture = Odd(*arguments)
    assert find_stack(nn.ModuleDict({"mlp": mixture}), 64) is None
    assert not mixture.experts._forward_pre_hooks


@pytest.mark.parametrize("resident", [0, 1])
def test_greedy_tokens_equal_transformers(family: str, resident: int) -> None:
    folder = reduced_model(family)
    with Served(folder, plan=small_pages(60), max_batch_tokens=48, placing=Placing(resident=resident)) as served:
        assert info_of(served.runner).notes[-1] == "experts on demand: 2 of 4"
        sessions = [served.open() for _ in range(3)]
        for session, length in zip(sessions, (60, 1, 33), strict=True):
            served.submit(session, prompt(length), max_tokens=12)
        served.run()
        for session, length in zip(sessions, (60, 1, 33), strict=True):
            assert session.tokens[length:] == reference.greedy(folder, prompt(length), 12)


def test_only_picked_experts_move(in_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches, placing = FetchCounter(monkeypatch), Placing(resident=1, packing=False)
    with Served(in_bf16, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
        sizes, before, picked = served.runner.places.sizes, fetches.total(), Picked(served)
        session = served.open()
        served.submit(session, prompt(1), max_tokens=8)
        served.run()
        moved = sum(len(experts) * sizes[block].experts.plain // 4 for block, experts in picked.calls)  # type: ignore[union-attr]
        assert all(len(experts) == 2 for _, experts in picked.calls)
        assert fetches.total() - before == 2 * len(picked.calls)
        assert moved == 8 * served.runner.places.fetched_bytes(1)
        assert served.runner.places.streamed_bytes == served.runner.places.passing_bytes + moved // 8


@pytest.mark.parametrize(("packing", "ways"), [(True, ["KSPK", "SKSP", "PPKS"]), (False, ["SSPP", "PSSP"])])
def test_modules_see_the_checkpoint_in_every_place(in_bf16: Path, packing: bool, ways: list[str]) -> None:
    with closing(CpuDevice(MEMORY)) as device:
        weights = load_weights(in_bf16, device, "bfloat16", placing=Placing(packing=packing))
        for way in ways:
            weights.placement.move(plan_of(weights, [PLACES[place] for place in way]))
            assert device.budget.used == weights.nbytes
            assert_as_in_the_checkpoint(weights, in_bf16, passes=2)
        weights.release(device)
        assert device.budget.used == 0
        assert not any(module._forward_pre_hooks for b in weights.skeleton.adapter.blocks for module in b.modules())


@torch.inference_mode()
def test_nothing_is_fetched_for_padding_tokens(in_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = FetchCounter(monkeypatch)
    with Served(in_bf16, dtype="bfloat16", plan=small_pages(60), placing=Placing(resident=0)) as served:
        inputs = StepInputs(served.device, tokens=8, rows=8, width=1)
        fill(inputs, [(prompt(1), 0, [1])], page_size=16)
        inputs.pad(tokens=1, rows=1, logit_rows=0)
        inputs.host["ids"][1:] = prompt(7)  # any tokens
        inputs.send()
        before, picked = fetches.total(), Picked(served)
        served.runner.model.forward(inputs, inputs.paged_batch(max_query=1, max_kv=16, fresh=False))
        assert [len(experts) for _, experts in picked.calls] == [2] * len(picked.calls)
        assert fetches.total() - before == 2 * len(picked.calls) > 0


@pytest.mark.parametrize("packing", [True, False])
def test_the_places_of_other_experts_are_not_touched(in_bf16: Path, packing: bool) -> None:
    """NaN in those places would spoil the results if they were read."""
    placing = Placing(resident=0, packing=packing)
    passed_over: list[int] = []

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        for weights in stacked(module):
            weights.fill_(float("nan"))

    def after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        picked = set(args[1].flatten().tolist())
        passed_over.append(4 - len(picked))
        assert out.isfinite().all()
        for weights in stacked(module):
            assert all(weights[e].isfinite().all() if e in picked else weights[e].isnan().all() for e in range(4))

    with Served(in_bf16, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
        for _, module in experts_of(served):
            module.register_forward_pre_hook(before, prepend=True)
            module.register_forward_hook(after)
        served.submit(served.open(), prompt(1), max_tokens=4)
        served.run()
    assert passed_over and all(passed_over)


def stacked(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 3]


@pytest.mark.parametrize("places", ["packed", "streamed packed", "streamed plain"])
def test_logits_equal_those_of_resident_blocks_to_the_bit(in_bf16: Path, places: str) -> None:
    def logits(placing: Placing, place: BlockPlace | None = None) -> list[Tensor]:
        with Served(in_bf16, dtype="bfloat16", plan=small_pages(60), max_batch_tokens=48, placing=placing) as served:
            if place is not None:
                served.runner.weights.placement.move(plan_of(served.runner.weights, [place] * 4))
                assert served.runner.places.count(place) == 4
            requests = [served.submit(served.open(), prompt(length)) for length in (1, 40, 90)]
            served.run()
            return [served.logits_of(request) for request in requests]

    resident = logits(Placing())
    if places == "packed":
        got = logits(Placing(), BlockPlace.PACKED)
    else:
        got = logits(Placing(resident=0, packing=places == "streamed packed"))
    for one, other in zip(got, resident, strict=True):
        assert torch.equal(one, other)
