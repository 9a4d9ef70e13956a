"""The kernels of stacked experts under Triton's interpreter. Run by test_interpreted.py, like kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from djinnd.model.kernels.experts.forward import ExpertTiles, experts_forward, pairs_of_tile, reads_codes, turning_rows
from djinnd.model.kernels.experts.gating import Activation
from djinnd.model.kernels.experts.grouping import group_pairs
from djinnd.model.kernels.experts.matrices import plain_matrices
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.weights.forms.coding import Coding
from tests.support.coded import QUICK
from tests.support.stacked_experts import ACTIVATIONS, SILU_HALVES, check_coded, check_plain, random_call

assert INTERPRETED

# exp of a large number is infinite on the GPU, and its inverse 0, which is intended; numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
EXPERTS = 6
SHAPE = (EXPERTS, 24, 8)  # experts, hidden, width
TALL = ExpertTiles(1, 32, 32, 1, 1)  # of single rows: fewer programs, which take long here


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("pairs", "size", "real"), [(40, 16, None), (600, 4, None), (40, 4, 5), (3, 16, 0)])
def test_pairs_are_grouped_by_expert_in_their_order(pairs: int, size: int, real: int | None) -> None:
    picked = torch.randint(-1, EXPERTS + 1, (pairs // 2, 2))  # with picks of no expert
    padding = None if real is None else torch.tensor([real], dtype=torch.int32)
    groups = group_pairs(picked, EXPERTS, size, padding)
    found: dict[int, list[int]] = {expert: [] for expert in range(EXPERTS)}
    assert len(groups.order) == len(groups.owners) * size
    for owner, tile in zip(groups.owners.tolist(), groups.order.view(-1, size).tolist(), strict=True):
        if owner >= 0:
            found[owner] += [pair for pair in tile if pair >= 0]
            assert tile == sorted(tile, key=lambda pair: pair < 0)  # empty places come last
    flat = picked.reshape(-1)[: None if real is None else 2 * real].tolist()
    assert found == {expert: [p for p, pick in enumerate(flat) if pick == expert] for expert in range(EXPERTS)}
    owners = [owner for owner in groups.owners.tolist() if owner >= 0]
    assert owners == sorted(owners)


def test_each_set_of_kernels_has_a_number_of_rows() -> None:
    for picks, experts in ((8, 128), (2, 8), (4, 32), (3, 6), (1, 2)):
        for is_plain in (True, False):
            sizes = [pairs_of_tile(n, picks, experts, is_plain=is_plain) for n in range(1, 50 * experts)]
            kinds = [(size, reads_codes(n, picks, experts)) for n, size in enumerate(sizes, 1)]
            firsts = [n + 1 for n, kind in enumerate(kinds) if n == 0 or kind != kinds[n - 1]]
            assert set(firsts) <= set(turning_rows(picks, experts))


@pytest.mark.parametrize(
    ("activation", "rows"),
    [
        *((each, rows) for each in ACTIVATIONS[::2] for rows in (1, 3, 20)),
        *(pytest.param(each, 3, marks=pytest.mark.long) for each in ACTIVATIONS[1::2]),
    ],
    ids=str,
)
def test_plain_experts(activation: Activation, rows: int) -> None:
    check_plain(rows, SHAPE, activation, torch.bfloat16, has_bias=activation.is_interleaved)


@pytest.mark.parametrize("rows", [1, 20])
def test_matrices_may_be_transposed(rows: int) -> None:
    check_plain(rows, SHAPE, ACTIVATIONS[2], torch.bfloat16, is_transposed=True, has_bias=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [*((rows, torch.bfloat16) for rows in (1, 2, 17, 70, 130)), (17, torch.float32), (17, torch.float16)],
    ids=str,
)
def test_all_tiles(rows: int, dtype: torch.dtype) -> None:
    assert [pairs_of_tile(rows, 3, EXPERTS) for rows in (1, 2, 17, 70, 130)] == [1, 16, 32, 64, 128]
    check_plain(rows, (EXPERTS, 64, 48), ACTIVATIONS[0], dtype)
    if rows < 100:
        check_plain(rows, (EXPERTS, 136, 24), ACTIVATIONS[2], dtype, is_transposed=True, has_bias=True)


@pytest.mark.parametrize(
    ("coding", "rows"),  # a single row of GGUF's blocks takes minutes here, and tests/gpu has it
    [
        *((QUICK[0], rows) for rows in (1, 7)),
        *(pytest.param(each, 1, marks=pytest.mark.long) for each in QUICK[1:3]),
        *(pytest.param(each, 7, marks=pytest.mark.long) for each in QUICK[1:-2]),
    ],
    ids=str,
)
def test_coded_experts(coding: Coding, rows: int) -> None:
    cols = next(cols for cols in (32, 64, 256) if coding.fits(2 * cols, cols))
    check_coded(rows, (EXPERTS, cols, cols), coding, torch.bfloat16, (TALL, TALL) if rows == 1 else None)


def call(experts: int = EXPERTS, rows: int = 5) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """x, picks and weights, and the other arguments."""
    first, second = torch.randn(experts, 16, 24).bfloat16() / 5, torch.randn(experts, 24, 8).bfloat16() / 3
    stacks = {"first": plain_matrices(first), "second": plain_matrices(second), "activation": SILU_HALVES}
    if pairs_of_tile(rows, 3, experts) == 1:
        stacks["tiles"] = (TALL, TALL)
    return random_call(rows, experts, 24, torch.bfloat16), stacks


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_of_padding_are_zero_and_change_no_other_row(rows: int) -> None:
    (x, picked, weights), stacks = call(experts=24, rows=rows)
    whole = experts_forward(x, picked, weights, **stacks)
    assert (pairs_of_tile(rows, 3, 24) == 1) == (rows == 2)
    x[-1], picked[-1], weights[-1] = torch.nan, 3, torch.nan
    got = experts_forward(x, picked, weights, **stacks, real=torch.tensor([rows - 1], dtype=torch.int32))
    assert torch.equal(got[:-1], whole[:-1]) and not got[-1].any() and whole[-1].any()


@pytest.mark.parametrize("rows", [1, 5])
def test_picks_of_no_expert_count_nothing(rows: int) -> None:
    (x, picked, weights), stacks = call(rows=rows)
    weights[:, 1] = 0
    wanted = experts_forward(x, picked, weights, **stacks)
    picked[:, 1], weights[:, 1] = EXPERTS, torch.nan
    assert torch.equal(experts_forward(x, picked, weights, **stacks), wanted) and wanted.any()


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    (x, picked, weights), stacks = call(rows=6)
    wanted = experts_forward(x, picked, weights, **stacks)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    assert torch.equal(experts_forward(x[order], picked[order], weights[order], **stacks), wanted[order])
    picked[1:] = picked[0]
    assert torch.equal(experts_forward(x, picked, weights, **stacks)[0], wanted[0])


def test_weights_in_float32_are_not_rounded() -> None:
    (x, picked, weights), stacks = call(rows=1)
    wide = weights.float() * (1 + 2**-10)
    got, rounded = (experts_forward(x, picked, each, **stacks) for each in (wide, wide.bfloat16()))
    assert torch.equal(rounded, experts_forward(x, picked, weights, **stacks))
    assert not torch.equal(got, rounded)


def test_benchmarks_may_set_tiles() -> None:
    tiles = (ExpertTiles(16, 16, 16, 4, 1), ExpertTiles(16, 32, 64, 4, 2))
    check_plain(4, SHAPE, SILU_HALVES, torch.bfloat16, tiles=tiles)
