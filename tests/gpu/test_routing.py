"""The kernel of routers on a GPU: real sizes, families' routers, captured graphs, and a loaded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.fast.router import FusedRouter
from djinnd.model.kernels.experts.routing import Weighting, route
from tests.support.cuda import cuda_device
from tests.support.loaded import load_weights
from tests.support.models import reduced_model
from tests.support.routed import WEIGHTINGS, check_routing, correction_of, random_logits
from tests.support.routers import FAMILIES, check_family

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(4, 2), (5, 5), (32, 4), (60, 6), (128, 8), (256, 8), (384, 22), (512, 10)]  # experts, picks


@pytest.fixture
def on_the_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
@pytest.mark.parametrize(("experts", "picks"), SIZES)
def test_picks_are_the_largest_and_their_weights_are_right(
    experts: int, picks: int, weighting: Weighting, dtype: torch.dtype
) -> None:
    for rows in (1, 3, 300, 5000):
        check_routing(random_logits(rows, experts, dtype), picks, weighting, dtype)


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "weighting"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_picks_and_weights_are_the_familys(name: str, weighting: Weighting, dtype: torch.dtype, rows: int) -> None:
    check_family(name, weighting, dtype, rows)


@pytest.mark.usefixtures("on_the_device")
def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    logits = torch.zeros(3, 64)
    logits[1, ::2], logits[2, 40:] = -0.0, 1.0
    picked, _ = route(logits, None, 4, WEIGHTINGS[0], torch.float32)
    assert picked.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [40, 41, 42, 43]]


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_rows_that_are_not_finite_pick_different_experts(weighting: Weighting) -> None:
    logits, strange = torch.randn(64, 96), torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    logits[:60] = strange[torch.randint(4, (60, 96))]
    logits[60], logits[61], logits[62] = strange[0], strange[1], strange[2]
    picked, _ = route(logits, correction_of(weighting, 96), 6, weighting, torch.float32)
    assert all(len(set(row)) == 6 for row in picked.tolist())
    assert int(picked.min()) >= 0 and int(picked.max()) < 96


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_a_replay_routes_the_logits_of_that_time(weighting: Weighting) -> None:
    logits, correction = random_logits(12, 128, torch.bfloat16), correction_of(weighting, 128)
    route(logits, correction, 8, weighting, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = route(logits, correction, 8, weighting, torch.bfloat16)
    for _ in range(2):
        logits.copy_(random_logits(12, 128, torch.bfloat16))
        graph.replay()
        wanted = route(logits, correction, 8, weighting, torch.bfloat16)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("family", "routers"), [("gpt-oss", 4), ("mixtral", 4), ("qwen3-moe", 3), ("llama-2", 0)])
def test_the_routers_of_a_loaded_family_are_replaced(family: str, routers: int) -> None:
    with cuda_device() as device:
        weights = load_weights(reduced_model(family), device)
        modules = [module for block in weights.skeleton.adapter.blocks for module in block.modules()]
        assert sum(isinstance(module.forward, FusedRouter) for module in modules) == routers
        weights.release(device)
