"""The kernel in the place of families' routers, on the CPU with interpreted kernels. Run by test_interpreted.py."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from djinnd.device.cpu import CpuDevice
from djinnd.model.family.skeleton import bind
from djinnd.model.fast import router as fast
from djinnd.model.fast.router import FusedRouter, fuse_routers, kind_of
from djinnd.model.kernels.experts.routing import Weighting
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.launches import KernelUnavailable
from djinnd.model.tuning import CHUNKS, FEW_SINGLES, SINGLES
from djinnd.weights.plan import BlockPlace
from tests.support.expert_fetches import FetchCounter
from tests.support.loaded import MEMORY, check_all, load_weights, paged_model
from tests.support.models import reduced_model
from tests.support.placed import plan_of
from tests.support.routers import EXPERTS, FAMILIES, HIDDEN, check_family, class_of, input_without_ties, router_of

assert INTERPRETED

# exp of a large number is infinite on the GPU, and its inverse 0, which is intended; numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "weighting"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_picks_and_weights_are_the_familys(name: str, weighting: Weighting, dtype: torch.dtype) -> None:
    check_family(name, weighting, dtype)


class Softened(Qwen3MoeTopKRouter):
    """Divides its logits by a number that no kernel has."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return super().forward(hidden_states / 1.01)


class Capped(GptOssTopKRouter):
    """Bounds its logits, which only large ones show."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits = linear(hidden_states, self.weight, self.bias).clamp(-30, 30)
        values, picks = logits.topk(self.top_k, dim=-1)
        return linear(hidden_states, self.weight, self.bias), values.softmax(1), picks


class Switched(Qwen3MoeTopKRouter):
    """Has an argument that changes its result."""

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, ...]:
        return super().forward(hidden_states * scale)


class Dense(GptOssTopKRouter):
    """Returns a weight for each expert, as the routers of some versions of transformers do."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, picks = super().forward(hidden_states)
        return torch.zeros_like(logits).scatter_(1, picks, weights), picks


@pytest.mark.parametrize(
    "router",
    [
        *(router_of(of) for of in (Softened, Capped, Switched, Dense)),
        router_of(DeepseekV3TopkRouter, n_group=4, topk_group=2),
        router_of(class_of("laguna.LagunaTopKRouter"), moe_router_logit_softcapping=5.0),
        router_of(class_of("deepseek_v2.DeepseekV2TopkRouter"), topk_method="group_limited_greedy", n_group=4),
        router_of(class_of("lfm2_moe.Lfm2MoeTopKRouter"), use_expert_bias=True),
        nn.Linear(HIDDEN, EXPERTS),
        nn.Embedding(EXPERTS, HIDDEN),
    ],
    ids=lambda router: type(router).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routers_that_compute_something_else_are_left_alone(router: nn.Module, dtype: torch.dtype) -> None:
    assert kind_of(router.to(dtype), dtype) is None


class Pair(Qwen3MoeTopKRouter):
    """Returns no logits, and its weights come last."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return super().forward(hidden_states)[:0:-1]


def test_the_result_has_the_familys_items_in_the_familys_order() -> None:
    router = router_of(Pair)
    x = input_without_ties(router)
    wanted = router(x)
    kind = kind_of(router, torch.float32)
    assert kind is not None
    FusedRouter(router, kind)
    picked, weights = router(hidden_states=x)
    assert torch.equal(picked, wanted[0])
    torch.testing.assert_close(weights, wanted[1])


@pytest.mark.parametrize("of", [Qwen3MoeTopKRouter, GptOssTopKRouter])
def test_rows_of_several_sequences_are_routed_as_the_family_does(of: type[nn.Module]) -> None:
    """Qwen's router flattens them. That of gpt-oss does not, and keeps its forward for them."""
    router = router_of(of)
    x = input_without_ties(router, 6).view(2, 3, HIDDEN)
    wanted = router(x)
    kind = kind_of(router, torch.float32)
    assert kind is not None and kind.flattens == (of is Qwen3MoeTopKRouter)
    FusedRouter(router, kind)
    for got, want in zip(router(x), wanted, strict=True):
        torch.testing.assert_close(got, want)


def unavailable(*_: object) -> Tensor:
    raise KernelUnavailable(None, "no compiler")  # type: ignore[arg-type]


def test_the_family_computes_where_the_kernel_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    router, x = router_of(GptOssTopKRouter), torch.randn(3, HIDDEN)
    wanted = router(x)
    kind = kind_of(router, torch.float32)
    assert kind is not None
    FusedRouter(router, kind)
    monkeypatch.setattr(fast, "route", unavailable)
    assert all(torch.equal(got, want) for got, want in zip(router(x), wanted, strict=True))


def test_weights_that_move_and_hooks_stay_with_the_module() -> None:
    router, x, seen = router_of(DeepseekV3TopkRouter), torch.randn(3, HIDDEN), []
    router.register_forward_hook(lambda module, given, output: seen.append(output))
    kind = kind_of(router, torch.float32)
    assert kind is not None
    FusedRouter(router, kind)
    router(x)
    other = router_of(DeepseekV3TopkRouter)
    bind(router, {name: other.state_dict()[name] for name in ("weight", "e_score_correction_bias")})
    picked = router(x)[2].sort(1).values
    assert torch.equal(picked, other(x)[2].sort(1).values) and len(seen) == 2


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("gpt-oss", BlockPlace.STREAMED),
        ("qwen3-moe", BlockPlace.PLAIN),
        *(pytest.param(each, BlockPlace.STREAMED, marks=pytest.mark.long) for each in ("qwen3-moe", "mixtral")),
    ],
)
def test_a_model_with_the_kernel_passes_its_check_at_load(
    family: str, place: BlockPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check pins the kernel's picks of its first pass for all later ones. Streamed experts are fetched by them."""
    trials: list[nn.Module] = []
    rows: list[int] = []
    own_trial, own_route = fast.kind_of, fast.route

    def tried(module: nn.Module, dtype: torch.dtype) -> fast.Kind | None:
        trials.append(module)
        return own_trial(module, dtype)

    def routed(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        rows.append(len(logits))
        return own_route(logits, *others)

    monkeypatch.setattr(fast, "kind_of", tried)
    monkeypatch.setattr(fast, "route", routed)
    fetches = FetchCounter(monkeypatch)
    with closing(CpuDevice(MEMORY)) as device:
        weights = load_weights(reduced_model(family), device)
        skeleton = weights.skeleton
        weights.placement.move(plan_of(weights, [place] * skeleton.num_blocks))
        for _ in range(2):
            fuse_routers(skeleton.adapter.blocks, weights.dtype)
        assert len(trials) == 1  # the blocks' routers are equal
        check_all(paged_model(weights, 8, 16), 100)
        weights.release(device)
    routers = sum(stack is not None for stack in skeleton.stacks)
    assert set(rows[:routers]) == {sum(CHUNKS) + (FEW_SINGLES if place is BlockPlace.STREAMED else SINGLES)}
    assert {*CHUNKS, 1} <= set(rows[routers:])
    assert (fetches.total() > 0) == (place is BlockPlace.STREAMED)
