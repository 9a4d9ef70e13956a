"""Kernels for coded weights on a GPU: matrices of real sizes, parts in pinned host memory, and captured graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.coded.product import ProductTiles, coded_product
from djinnd.model.tuning import FEW_ROWS
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from tests.support.coded import (
    CANARY,
    CODINGS,
    FP8,
    SHAPES,
    check_decode,
    check_every_byte,
    check_product,
    check_transposed,
    decoded,
    random_parts,
)

pytestmark = pytest.mark.gpu

LARGE = (4096, 14_336)
LARGE_CODINGS = [coding for coding in [*CODINGS, Scaled(FP8, 128, 128), Grouped(4, 128)] if coding.fits(*LARGE)]


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_matrices_are_decoded_to_the_bit(coding: Coding, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        if coding.fits(rows, cols):
            check_decode(coding, random_parts(coding, rows, cols, 3), torch.zeros(3, rows, cols, dtype=dtype))
            check_transposed(coding, rows, cols)


@pytest.mark.parametrize("coding", LARGE_CODINGS, ids=str)
def test_large_matrices(coding: Coding) -> None:
    check_decode(coding, random_parts(coding, *LARGE), torch.zeros(1, *LARGE, dtype=torch.bfloat16))
    check_transposed(coding, *LARGE)
    for tokens in (1, 2, FEW_ROWS):
        check_product(coding, LARGE, tokens, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_byte_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    check_every_byte(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_products(coding: Coding, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        if coding.fits(*shape):
            for tokens in (1, 3, FEW_ROWS):
                check_product(coding, shape, tokens, dtype)


@pytest.mark.parametrize("coding", [Scaled(FP8, 128, 128), Float4()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bias_is_added_before_the_product_is_rounded(coding: Coding, dtype: torch.dtype) -> None:
    for tokens in (1, 2, FEW_ROWS):
        check_product(coding, (640, 1280), tokens, dtype, has_bias=True)


def test_products_with_other_tiles() -> None:
    for coding in (Scaled(FP8, 4, 32), Float4()):
        for splits in (1, 3, 8):
            check_product(coding, (70, 1280), 5, torch.bfloat16, ProductTiles(32, 64, 16, 2, 3, splits))
        check_product(coding, (70, 1280), 1, torch.bfloat16, ProductTiles(8, 256, 4, 2, 1))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_captured_graph_decodes_the_picked_matrices_from_host_memory(coding: Coding) -> None:
    shape = next(shape for shape in ((640, 1024), (640, 960)) if coding.fits(*shape))
    parts = [part.cpu().pin_memory() for part in random_parts(coding, *shape, stack=4)]
    picked, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, *shape, dtype=torch.bfloat16)
    wanted = decoded(coding, [part.cuda() for part in parts], out)
    decode_on_device(coding, parts, out, picked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_on_device(coding, parts, out, picked)
    for chosen in ([], [2], [0, 3]):
        picked.zero_()
        picked[chosen] = 1
        out.fill_(CANARY)
        graph.replay()
        for matrix in range(4):
            expected = wanted[matrix] if matrix in chosen else torch.full_like(out[matrix], CANARY)
            assert torch.equal(out[matrix], expected)


def test_a_product_is_equal_each_time() -> None:
    coding = Scaled(FP8, 128, 128)
    parts = random_parts(coding, *LARGE)
    for tokens in (1, 5):
        x = torch.randn(tokens, LARGE[1]).bfloat16()
        assert torch.equal(coded_product(coding, parts, x), coded_product(coding, parts, x))
