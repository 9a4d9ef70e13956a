"""The kernels for coded weights under Triton's interpreter. Run by test_kernels.py, like interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from djinnd.model.kernels.coded import decode
from djinnd.model.kernels.coded.decode import decode_on_device, decodes
from djinnd.model.kernels.coded.product import ProductTiles, coded_product, product_fits
from djinnd.model.kernels.tile import INTERPRETED
from djinnd.model.tuning import FEW_ROWS
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tests.support.coded import random_parts
from tests.support.parameters import long_except

assert INTERPRETED

FP8 = torch.float8_e4m3fn
SCALED = [
    Scaled(FP8, 4, 32),
    Scaled(FP8, 1),
    Scaled(FP8),
    Scaled(torch.int8, 1),
    Scaled(torch.int8, 1, 64),
    Scaled(torch.int8, 3, 5),
]
GROUPED = [
    Grouped(4, 32),
    Grouped(4, 64, torch.bfloat16, has_zeros=True),
    Grouped(4, 32, has_order=True),
    Grouped(4, 32, has_zeros=True, has_order=True),
    Grouped(8, 32, torch.float32, has_zeros=True, has_order=True),
    Grouped(8, 16),
    Grouped(4, 24),
]
GGUF = [GgufBlocks(number) for number in (2, 3, 6, 7, 8, 12, 13, 14)]
CODINGS = [*SCALED, *GROUPED, Float4(), Float4(is_nvidia=True), *GGUF]
SHAPES = [(11, 320), (131, 288), (3, 1280), (9, 32), (21, 768)]
# Codings of which another one takes the same path.
QUICK = [SCALED[0], SCALED[5], GROUPED[1], GROUPED[3], GROUPED[5], Float4(is_nvidia=True), GGUF[3], *GGUF[4:]]
CANARY = -7.0


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def decoded(coding: Coding, parts: list[Tensor], out: Tensor) -> Tensor:
    """The reference, in the shape and dtype of out."""
    wanted = torch.empty(out.shape, dtype=out.dtype)
    coding.decode(parts, wanted)
    return wanted


def shape_of(coding: Coding) -> tuple[int, int]:
    return next(shape for shape in SHAPES if coding.fits(*shape))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_matrices_are_decoded_to_the_bit(coding: Coding) -> None:
    parts = random_parts(coding, *shape_of(coding), stack=2)
    out = torch.zeros(2, *shape_of(coding), dtype=torch.bfloat16)
    decode_on_device(coding, parts, out)
    assert torch.equal(out, decoded(coding, parts, out))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_other_shapes_and_dtypes_are_decoded_to_the_bit(coding: Coding, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        if coding.fits(rows, cols):
            parts = random_parts(coding, rows, cols)
            out = torch.zeros(1, rows, cols, dtype=dtype)
            decode_on_device(coding, parts, out)
            assert torch.equal(out, decoded(coding, parts, out))


@pytest.mark.parametrize("coding", long_except(QUICK, CODINGS), ids=str)
def test_the_result_may_be_transposed(coding: Coding) -> None:
    rows, cols = 70, shape_of(coding)[1]
    parts = random_parts(coding, rows, cols)
    out = torch.zeros(1, cols, rows, dtype=torch.bfloat16).transpose(1, 2)
    decode_on_device(coding, parts, out)
    assert torch.equal(out, decoded(coding, parts, out))


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


def every_byte(cols: int) -> Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(1, 1, cols)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("dtype", long_except((torch.bfloat16,), (torch.bfloat16, torch.float32)))
def test_every_byte_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    mx_scales = every_byte(256).transpose(1, 2).contiguous()
    few_codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]], dtype=torch.uint8)
    nv_scales = every_byte(128 * 2)[..., :128].transpose(1, 2).contiguous().view(FP8)
    cases: list[tuple[Coding, list[Tensor]]] = [
        (Scaled(FP8), [every_byte(256).view(FP8), torch.full((1, 1, 1), 1.5)]),
        (Scaled(torch.int8), [every_byte(256).view(torch.int8), torch.full((1, 1, 1), 0.3)]),
        (Float4(), [few_codes.expand(1, 256, 16).contiguous(), mx_scales]),
        (
            Float4(is_nvidia=True),
            [few_codes[..., :8].expand(1, 128, 8).contiguous(), nv_scales, torch.full((1, 1, 1), 0.7)],
        ),
    ]
    for coding, parts in cases:
        cols = parts[0].shape[2] * (2 if isinstance(coding, Float4) else 1)
        out = torch.zeros(1, parts[0].shape[1], cols, dtype=dtype)
        decode_on_device(coding, parts, out)
        torch.testing.assert_close(out, decoded(coding, parts, out), rtol=0, atol=0, equal_nan=True)


def check_product(
    coding: Coding, shape: tuple[int, int], tokens: int, dtype: torch.dtype, tiles: ProductTiles | None = None
) -> None:
    """Compares a product with one in float64 of the decoded matrix, rounded to x's dtype if tensor cores multiply."""
    rows, cols = shape
    parts, x = random_parts(coding, rows, cols), torch.randn(tokens, cols).to(dtype)
    wide = torch.full((tokens, rows + 9), CANARY, dtype=dtype)
    y = coded_product(coding, parts, x, wide[:, 4 : rows + 4], tiles=tiles)
    assert (wide[:, :4] == CANARY).all() and (wide[:, rows + 4 :] == CANARY).all()
    weights = decoded(coding, parts, torch.empty(1, rows, cols, dtype=torch.float32 if tokens == 1 else dtype))[0]
    exact = x.double() @ weights.double().T
    size = x.double().abs() @ weights.double().abs().T
    error = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 0.0
    assert exact.std() > 0
    assert ((y.double() - exact).abs() <= exact.abs() * error + size * 2.0**-20).all()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("coding", long_except(QUICK, CODINGS), ids=str)
def test_products(coding: Coding, tokens: int) -> None:
    assert product_fits(coding, *shape_of(coding))
    check_product(coding, shape_of(coding), tokens, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_products_of_other_shapes(coding: Coding, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        if coding.fits(*shape):
            for tokens in (1, 2, FEW_ROWS):
                check_product(coding, shape, tokens, dtype)


@pytest.mark.parametrize("tokens", [2, FEW_ROWS])
@pytest.mark.parametrize("coding", long_except([Float4()], [Scaled(FP8, 4, 32), Float4(), GgufBlocks(8)]), ids=str)
def test_columns_may_be_divided_among_programs(coding: Coding, tokens: int) -> None:
    check_product(coding, (21, 640), tokens, torch.bfloat16, ProductTiles(16, 64, 16, 4, 2, splits=3))


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
