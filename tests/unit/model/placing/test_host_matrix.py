"""Products on the host by codes of 8 bits, compared with products of the decoded weights in float64."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.placing import host_matrix
from djinnd.model.placing.host_matrix import Int8Matrix, int8_group, int8_matrix, is_multiplied_in_place
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled

CODES = [
    Scaled(torch.int8, 1),
    Scaled(torch.int8, 1, 64),
    Scaled(torch.int8, 1, 128),  # the last group has 64 columns
    Scaled(torch.int8, 3, 128),
    Scaled(torch.int8),
    Grouped(8, 32),
    Grouped(8, 320, torch.bfloat16),  # a scale for each row
]
ROWS, COLS = 48, 320


def parts_of(coding: Coding, rows: int = ROWS, cols: int = COLS) -> list[torch.Tensor]:
    parts = []
    for part in coding.parts(rows, cols):
        if part.name == "codes":
            parts.append(torch.randint(0, 256, (1, *part.shape), dtype=torch.uint8).view(part.dtype))
        else:
            parts.append((torch.rand(1, *part.shape) + 0.5).to(part.dtype))
    return parts


# In 16 bits, scales and the sums of both halves are rounded.
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float16, 2e-3)])
@pytest.mark.parametrize("coding", CODES, ids=repr)
def test_products_are_those_of_the_decoded_weights(coding: Coding, dtype: torch.dtype, error: float) -> None:
    parts = parts_of(coding)
    matrix = int8_matrix(coding, parts, dtype)
    weights = torch.empty(1, ROWS, COLS)
    coding.decode(parts, weights)
    for tokens in (1, 3, 17):
        x = (torch.randn(tokens, COLS) / 16).to(dtype)
        wanted, got = x.double() @ weights[0].double().T, matrix.multiply(x)
        assert got.dtype is dtype and got.shape == (tokens, ROWS)
        assert (got.double() - wanted).norm() < error * wanted.norm()


def test_more_rows_than_are_ordered_at_once_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    coding, x = Scaled(torch.int8, 1, 64), torch.randn(2, COLS)
    parts = parts_of(coding, 208)
    wanted = int8_matrix(coding, parts, torch.float32).multiply(x)
    monkeypatch.setattr(host_matrix, "ORDERED_ROWS", 64)
    assert torch.equal(int8_matrix(coding, parts, torch.float32).multiply(x), wanted)


@pytest.mark.parametrize("coding", CODES, ids=repr)
def test_only_int8_codes_with_a_scale_for_each_row_are_not_copied(coding: Coding) -> None:
    parts = parts_of(coding)
    matrix, own = int8_matrix(coding, parts, torch.bfloat16), parts[0].untyped_storage().data_ptr()
    is_in_place = isinstance(matrix, Int8Matrix) and matrix.codes.untyped_storage().data_ptr() == own
    assert is_in_place == is_multiplied_in_place(coding, ROWS, COLS) == (coding in (CODES[0], CODES[4]))


@pytest.mark.parametrize(
    ("coding", "rows", "cols"),
    [
        (Scaled(torch.float8_e4m3fn, 1), 48, 320),
        (Scaled(torch.int8, 1), 48, 328),  # torch would read behind the matrix
        (Scaled(torch.int8, 1, 16), 48, 320),
        (Scaled(torch.int8, 1, 128), 48, 144),
        (Scaled(torch.int8, 1, 128), 40, 320),
        (Grouped(8, 32, has_zeros=True), 48, 320),
        (Grouped(8, 32, has_order=True), 48, 320),
        (Grouped(4, 32), 48, 320),
        (Float4(), 48, 320),
    ],
    ids=repr,
)
def test_other_codes_and_shapes_are_not_multiplied(coding: Coding, rows: int, cols: int) -> None:
    assert int8_group(coding, rows, cols) is None
