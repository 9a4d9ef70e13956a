"""The kernels of stacked experts on a GPU: real sizes, all tiles, every code, and captured graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.kernels.experts.forward import experts_forward
from djinnd.model.kernels.experts.gating import Activation
from djinnd.model.kernels.experts.matrices import plain_matrices
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from tests.support.coded import CODINGS, FP8
from tests.support.stacked_experts import ACTIVATIONS, SILU_HALVES, check_coded, check_plain, random_call

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 16, 100, 700)
LARGE_CODINGS = [Scaled(FP8, 128, 128), Scaled(torch.int8, 1), Grouped(4, 128, has_zeros=True), Float4()]


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_plain_experts(activation: Activation, dtype: torch.dtype, is_transposed: bool) -> None:
    if is_transposed and not activation.is_interleaved:
        pytest.skip("no family has these")
    for rows in ROWS:
        check_plain(rows, (8, 320, 136), activation, dtype, is_transposed=is_transposed, has_bias=is_transposed)


@pytest.mark.parametrize("rows", [1, 4, 16, 256])
def test_experts_of_a_real_size(rows: int) -> None:
    check_plain(rows, (128, 2048, 768), SILU_HALVES, torch.bfloat16)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_coded_experts(coding: Coding) -> None:
    cols = next(cols for cols in (64, 96, 256) if coding.fits(2 * cols, cols))
    for rows in (1, 3, 16, 100):
        check_coded(rows, (8, cols, cols), coding, torch.bfloat16)


@pytest.mark.parametrize("coding", LARGE_CODINGS, ids=str)
def test_coded_experts_of_a_real_size(coding: Coding) -> None:
    for rows in (1, 16):
        check_coded(rows, (32, 2048, 768), coding, torch.bfloat16)


def test_a_replay_multiplies_by_the_experts_that_are_picked_at_that_time() -> None:
    first, second = torch.randn(16, 192, 256).bfloat16() / 16, torch.randn(16, 256, 96).bfloat16() / 10
    matrices = plain_matrices(first), plain_matrices(second)
    for rows in (1, 12):
        x, picked, weights = random_call(rows, 16, 256, torch.bfloat16)
        real = torch.tensor([rows], dtype=torch.int32)
        experts_forward(x, picked, weights, *matrices, SILU_HALVES, real)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts_forward(x, picked, weights, *matrices, SILU_HALVES, real)
        for count in (rows, rows - 1):
            for given, new in zip((x, picked, weights), random_call(rows, 16, 256, torch.bfloat16), strict=True):
                given.copy_(new)
            real.fill_(count)
            graph.replay()
            wanted = experts_forward(x, picked, weights, *matrices, SILU_HALVES, real)
            assert torch.equal(out, wanted) and not out[count:].any() and (count == 0 or out[:count].any())


@pytest.mark.parametrize("rows", [3, 16, 100, 700])
def test_a_row_does_not_depend_on_the_other_rows(rows: int) -> None:
    first, second = torch.randn(16, 192, 256).bfloat16() / 16, torch.randn(16, 256, 96).bfloat16() / 10
    matrices = plain_matrices(first), plain_matrices(second)
    x, picked, weights = random_call(rows, 16, 256, torch.bfloat16)
    wanted = experts_forward(x, picked, weights, *matrices, SILU_HALVES)
    order = torch.randperm(rows)
    got = experts_forward(x[order], picked[order], weights[order], *matrices, SILU_HALVES)
    assert torch.equal(got, wanted[order])
    x[1:], picked[1:] = x[0], picked[0]
    assert torch.equal(experts_forward(x, picked, weights, *matrices, SILU_HALVES)[0], wanted[0])
