"""The kernels for packed weights under Triton's interpreter. Run by test_interpreted.py, like kernels.py."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed.product import ProductTiles, packed_product, product_fits
from djinnd.model.kernels.packed.unpack import unpack
from djinnd.model.tuning import FEW_ROWS
from tests.support.packed import ODD, cancelling, check_product, form_of, matrix, packed, same_weights, tame, weights

assert INTERPRETED

SHAPES = [(70, 128), (66, 384), (33, 50), (9, 1152)]
HALVES = [(33, 50), (37, 192), (8, 64), (1, 320), (131, 576), (20, 128)]  # of most of them, odd rows begin in a group
VECTOR = [ProductTiles(1, 256, 1, 1), ProductTiles(4, 64, 1, 2), ProductTiles(16, 512, 1, 1)]
MATRIX = [ProductTiles(16, 64, 2, 3), ProductTiles(64, 128, 4, 2, splits=3), ProductTiles(32, 32, 4, 2, splits=2)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize("odd", [[], [*ODD[:4], float("inf"), float("nan")]], ids=["no patches", "patches"])
def test_unpack(odd: list[float]) -> None:
    form = form_of(SHAPES, vectors=77)
    plain = weights(form, odd)
    out = torch.empty_like(plain)
    unpack(form, packed(form, plain), out)
    assert same_weights(form, out, plain)


def test_patches_with_bad_places_write_nothing() -> None:
    form = form_of([(40, 128)], vectors=64)
    plain = tame(form)
    buffer, memory = packed(form, plain), torch.zeros(form.numel + 256, dtype=torch.bfloat16)
    patches = form.patches_view(buffer)
    patches[:, 0] = torch.tensor([form.matrices, form.numel + 100, -1, -(1 << 31)]).repeat(len(patches) // 4)
    patches[:, 1] = 0x4242
    form.head_view(buffer)[2] = (1 << 31) - 1
    unpack(form, buffer, memory[: form.numel])
    assert same_weights(form, memory[: form.numel], plain)
    assert not memory[form.numel :].any()


@pytest.mark.parametrize(
    ("number", "tokens", "tiles"),
    [
        (1, 1, None),
        (1, 1, VECTOR[-1]),
        *(pytest.param(1, 1, t, marks=pytest.mark.long) for t in VECTOR[:-1]),
        (1, 3, None),
        *((1, t, x) for t in (2, FEW_ROWS) for x in MATRIX),
        *(pytest.param(n, t, None, marks=pytest.mark.long) for n in (0, 3) for t in (1, 2, 3, FEW_ROWS)),
    ],
    ids=str,
)
def test_product(number: int, tokens: int, tiles: ProductTiles | None) -> None:
    form = form_of(SHAPES)
    plain = weights(form, ODD[:5])
    x = torch.randn(tokens, form.units[number].cols).to(torch.bfloat16)
    check_product(form, number, plain, x, packed_product(form, number, packed(form, plain), x, tiles=tiles))


@pytest.mark.parametrize(("tokens", "tiles"), [(1, None), (1, VECTOR[-1]), (3, MATRIX[0]), (3, MATRIX[1])], ids=str)
def test_the_bias_is_added_before_the_product_is_rounded(tokens: int, tiles: ProductTiles | None) -> None:
    form = form_of(SHAPES)
    plain = weights(form, ODD[:5])
    x = torch.randn(tokens, form.units[1].cols).to(torch.bfloat16)
    bias = cancelling(form, 1, plain, x)
    y = packed_product(form, 1, packed(form, plain), x, bias, tiles=tiles)
    check_product(form, 1, plain, x, y, bias)


@pytest.mark.parametrize("tokens", [1, 2])
def test_product_with_more_patches_than_fit_at_once(tokens: int) -> None:
    form = form_of([(500, 128), (16, 128)])
    plain = weights(form)
    matrix(form, 1, plain)[3, :70] = -5.0
    x = torch.randn(tokens, 128).to(torch.bfloat16)
    check_product(form, 1, plain, x, packed_product(form, 1, packed(form, plain), x))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("tokens", [1, 2])
def test_an_infinite_weight_affects_only_its_row(tokens: int) -> None:
    form = form_of([(20, 256)])
    plain = weights(form, [float("inf"), float("nan"), 3e38])
    x = torch.randn(tokens, 256).to(torch.bfloat16)
    y = packed_product(form, 0, packed(form, plain), x)
    check_product(form, 0, plain, x, y)
    assert int(y[0].isfinite().sum()) >= 17


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_windows_may_be_far_from_one(tokens: int, size: float) -> None:
    form = form_of([(20, 256)])
    plain = (weights(form).float() * size).to(torch.bfloat16)
    x = torch.randn(tokens, 256).to(torch.bfloat16)
    check_product(form, 0, plain, x, packed_product(form, 0, packed(form, plain), x))


@pytest.mark.parametrize("tokens", [1, 2])
def test_bad_stripes_read_nothing_outside_of_the_patches(tokens: int) -> None:
    form = form_of([(20, 256)])
    buffer = packed(form, weights(form))
    form.stripes_view(buffer)[:] = torch.tensor([-5, 1 << 30, -(1 << 31), 7])
    form.patches_view(buffer)[:] = -1
    x = torch.randn(tokens, 256).to(torch.bfloat16)
    plain = torch.empty(form.numel, dtype=torch.bfloat16)
    form.unpack(buffer, plain)
    check_product(form, 0, plain, x, packed_product(form, 0, buffer, x))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "tiles"),
    [
        *((1, t) for t in (None, VECTOR[1], VECTOR[2])),
        (3, None),
        *((FEW_ROWS, t) for t in (MATRIX[0], MATRIX[2])),
        *(pytest.param(3, t, marks=pytest.mark.long) for t in MATRIX),
    ],
    ids=str,
)
def test_rows_may_begin_in_the_middle_of_a_group(number: int, tokens: int, tiles: ProductTiles | None) -> None:
    """The first and last columns of the first two and last two rows have patches, too."""
    form = form_of(HALVES)
    plain = weights(form, ODD[:5])
    unit = matrix(form, number, plain)
    for rows in (unit[:2], unit[-2:]):
        rows[:, [0, 63, -64, -1]] = 9.0 * torch.randn(len(rows), 4).to(torch.bfloat16)
    x = torch.randn(tokens, form.units[number].cols).to(torch.bfloat16)
    check_product(form, number, plain, x, packed_product(form, number, packed(form, plain), x, tiles=tiles))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("tokens", [1, 2])
def test_an_infinite_weight_does_not_affect_the_row_in_the_other_half_of_its_group(tokens: int) -> None:
    form = form_of([(6, 192)])
    plain = weights(form)
    matrix(form, 0, plain)[0, 191], matrix(form, 0, plain)[3, 0] = float("inf"), float("nan")
    x = torch.randn(tokens, 192).to(torch.bfloat16)
    y = packed_product(form, 0, packed(form, plain), x)
    check_product(form, 0, plain, x, y)
    assert y.isfinite().all(0).tolist() == [False, True, True, False, True, True]


def test_rows_that_are_no_half_groups_are_not_supported() -> None:
    assert [product_fits(unit) for unit in form_of(SHAPES).units] == [True, True, False, True]
    assert [product_fits(unit) for unit in form_of(HALVES).units] == [False, True, True, True, True, True]
