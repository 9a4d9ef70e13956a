"""The kernel of routers, on the CPU with Triton's interpreter. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_PICKS, Weighting, route
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from tests.support.routed import WEIGHTINGS, check_routing, correction_of, random_logits

assert INTERPRETED

# exp of a large number is infinite on the GPU, and its inverse 0; inf - inf is NaN. Both are intended, and numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_picks_are_the_largest_and_their_weights_are_right(weighting: Weighting, dtype: torch.dtype) -> None:
    for rows, experts, picks in ((5, 32, 4), (3, 60, 6), (2, 128, 8), (1, 4, 2)):
        check_routing(random_logits(rows, experts, dtype), picks, weighting, dtype)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
@pytest.mark.parametrize(("rows", "experts", "picks"), [(1, 512, 10), (1, 384, 22), (2, 4, 1), (3, 5, 5)])
def test_numbers_of_experts_and_picks(rows: int, experts: int, picks: int, weighting: Weighting) -> None:
    check_routing(random_logits(rows, experts, torch.bfloat16), picks, weighting, torch.bfloat16)


def test_many_rows() -> None:
    check_routing(random_logits(300, 8, torch.bfloat16), 2, WEIGHTINGS[0], torch.bfloat16)


def test_weights_may_be_wider_than_logits() -> None:
    check_routing(random_logits(4, 16, torch.bfloat16), 2, WEIGHTINGS[2], torch.float32)
    check_routing(random_logits(4, 16, torch.float32), 2, WEIGHTINGS[2], torch.bfloat16)


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, -0.0, 2.0], [-1.0, -0.0, 0.0, -1.0]])
    picked, weights = route(logits, None, 3, WEIGHTINGS[0], torch.float32)
    assert picked.tolist() == [[0, 1, 2], [1, 3, 0], [1, 2, 0]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("scores", [SOFTMAX_OF_PICKS, SOFTMAX, SIGMOID], ids=str)
def test_rows_that_are_not_finite_pick_different_experts_and_change_no_other_row(scores: object) -> None:
    weighting = Weighting(scores.value)  # type: ignore[attr-defined]
    logits = torch.randn(7, 5)
    alone = route(logits[6:], None, 3, weighting, torch.float32)
    logits[0], logits[1], logits[2] = NAN, -INF, INF
    logits[3] = torch.tensor([1.0, NAN, INF, -INF, 2.0])
    logits[4] = torch.tensor([-INF, 1.0, -INF, -INF, -INF])
    logits[5] = -logits[0]  # NaN with a sign
    picked, weights = route(logits, None, 3, weighting, torch.float32)
    assert picked[:6].tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 4], [1, 0, 2], [0, 1, 2]]
    assert weights[4].tolist() == pytest.approx([1 if scores is not SIGMOID else 0.7310586, 0, 0])
    assert torch.equal(picked[6:], alone[0]) and torch.equal(weights[6:], alone[1])


def test_a_correction_changes_picks_but_not_their_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    plain, corrected = Weighting(SIGMOID.value), Weighting(SIGMOID.value, is_corrected=True)
    assert route(logits, None, 2, plain, torch.float32)[0].tolist() == [[0, 1]]
    picked, weights = route(logits, torch.tensor([-9.0, 0.0, 0.0, 9.0]), 2, corrected, torch.float32)
    assert picked.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, logits[:, [3, 1]].sigmoid())


def test_a_correction_that_is_not_finite_does_no_harm() -> None:
    correction = torch.tensor([NAN, -INF, INF, 0.0])
    picked, _ = route(torch.zeros(1, 4), correction, 4, Weighting(SIGMOID.value, is_corrected=True), torch.float32)
    assert picked.tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_a_row_does_not_depend_on_the_other_rows(weighting: Weighting) -> None:
    logits, correction = random_logits(5, 24, torch.bfloat16), correction_of(weighting, 24)
    picked, weights = route(logits, correction, 4, weighting, torch.bfloat16)
    order = torch.tensor([3, 0, 4])
    again = route(logits[order], correction, 4, weighting, torch.bfloat16)
    assert torch.equal(again[0], picked[order]) and torch.equal(again[1], weights[order])


def test_logits_may_be_part_of_a_wider_tensor() -> None:
    logits = torch.randn(3, 40)[:, 4:20]
    assert torch.equal(route(logits, None, 2, WEIGHTINGS[0], torch.float32)[0], logits.topk(2).indices)
