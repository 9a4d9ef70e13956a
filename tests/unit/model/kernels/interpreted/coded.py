"""The kernels for coded weights under Triton's interpreter. Run by test_interpreted.py, like kernels.py."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.kernels.coded import decode
from djinnd.model.kernels.coded.decode import decode_on_device, decodes
from djinnd.model.kernels.coded.product import ProductTiles, coded_product, product_fits
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.tuning import FEW_ROWS
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tests.support.coded import (
    CANARY,
    CODINGS,
    FP8,
    QUICK,
    SHAPES,
    check_decode,
    check_every_byte,
    check_product,
    check_transposed,
    decoded,
    random_parts,
    shape_of,
)
from tests.support.parameters import long_except

assert INTERPRETED


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize("coding", long_except(QUICK, CODINGS), ids=str)
def test_matrices_are_decoded_to_the_bit(coding: Coding) -> None:
    parts = random_parts(coding, *shape_of(coding), stack=2)
    check_decode(coding, parts, torch.zeros(2, *shape_of(coding), dtype=torch.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize(
    ("coding", "dtype"), [*((each, torch.float32) for each in QUICK), (QUICK[0], torch.float16)], ids=str
)
def test_other_shapes_and_dtypes_are_decoded_to_the_bit(coding: Coding, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        if coding.fits(rows, cols):
            check_decode(coding, random_parts(coding, rows, cols), torch.zeros(1, rows, cols, dtype=dtype))


@pytest.mark.parametrize("coding", long_except(QUICK[:2], QUICK[:-2]), ids=str)
def test_the_result_may_be_transposed(coding: Coding) -> None:
    check_transposed(coding, 70, shape_of(coding)[1])


@pytest.mark.parametrize("picked", [[0, 0, 0], [0, 5, 0], [1, 0, -1]], ids=str)
@pytest.mark.parametrize("coding", [Scaled(FP8, 4, 32), Float4(is_nvidia=True)], ids=str)
def test_only_picked_matrices_are_decoded(coding: Coding, picked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", 2)
    parts = random_parts(coding, 20, 256, stack=3)
    out = torch.full((3, 20, 256), CANARY, dtype=torch.bfloat16)
    decode_on_device(coding, parts, out, torch.tensor(picked, dtype=torch.int32))
    wanted = decoded(coding, parts, out)
    for matrix, is_picked in enumerate(picked):
        assert torch.equal(out[matrix], wanted[matrix] if is_picked else torch.full_like(out[matrix], CANARY))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("dtype", long_except((torch.bfloat16,), (torch.bfloat16, torch.float32)))
def test_every_byte_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    check_every_byte(dtype)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("coding", long_except(QUICK, CODINGS), ids=str)
def test_products(coding: Coding, tokens: int) -> None:
    assert product_fits(coding, *shape_of(coding))
    check_product(coding, shape_of(coding), tokens, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("coding", "dtype"),
    [
        *((each, torch.bfloat16) for each in QUICK),
        *((each, torch.float32) for each in QUICK[:3]),
        (QUICK[0], torch.float16),
    ],
    ids=str,
)
def test_products_of_other_shapes(coding: Coding, dtype: torch.dtype) -> None:
    """One row and several rows have kernels of their own."""
    for shape in SHAPES[2:]:
        if coding.fits(*shape):
            check_product(coding, shape, 1 if shape[0] % 2 else FEW_ROWS, dtype)
    check_product(coding, shape_of(coding), FEW_ROWS, dtype)


@pytest.mark.parametrize("tokens", [2, FEW_ROWS])
@pytest.mark.parametrize("coding", long_except([Float4()], [Scaled(FP8, 4, 32), Float4(), GgufBlocks(8)]), ids=str)
def test_columns_may_be_divided_among_programs(coding: Coding, tokens: int) -> None:
    check_product(coding, (21, 640), tokens, torch.bfloat16, ProductTiles(16, 64, 16, 4, 2, splits=3))


@pytest.mark.parametrize(("tokens", "splits"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("coding", long_except([Float4()], [Scaled(FP8, 4, 32), Float4(), GgufBlocks(8)]), ids=str)
def test_the_bias_is_added_before_the_product_is_rounded(coding: Coding, tokens: int, splits: int) -> None:
    tiles = ProductTiles(16, 64, 16, 4, 2, splits)
    check_product(coding, (21, 640), tokens, torch.bfloat16, tiles, has_bias=True)


def test_bad_groups_read_nothing_outside_of_the_scales() -> None:
    coding = Grouped(4, 32, has_zeros=True, has_order=True)
    parts = random_parts(coding, 5, 64)
    good = parts[3] = torch.tensor([0, 1, 1, 0] * 16, dtype=torch.int32).view(1, 1, 64)
    bad = torch.where(good == 0, -(1 << 31), (1 << 31) - 1).to(torch.int32)
    out, again = torch.zeros(1, 5, 64), torch.zeros(1, 5, 64)
    decode_on_device(coding, parts, out)
    decode_on_device(coding, [*parts[:3], bad], again)
    assert torch.equal(out, again) and out.std() > 0
    x = torch.randn(1, 64)
    assert torch.equal(coded_product(coding, parts, x), coded_product(coding, [*parts[:3], bad], x))


@pytest.mark.parametrize("coding", [Grouped(4, 5), GgufBlocks(0)], ids=str)
def test_codings_without_a_kernel_are_told(coding: Coding) -> None:
    assert coding.fits(4, 20)
    assert not product_fits(coding, 4, 20) and not decodes(coding, 4, 20)
