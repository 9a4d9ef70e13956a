"""Products on the host by codes of 8 bits, compared with products of the decoded weights in float64."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.placing.host_matrix import int8_columns, int8_matrix, is_one_group
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
ROWS, COLS = 20, 320


def parts_of(coding: Coding, rows: int = ROWS, cols: int = COLS) -> list[torch.Tensor]:
    parts = []
    for part in coding.parts(rows, cols):
        if part.name == "codes":
            parts.append(torch.randint(0, 256, (1, *part.shape), dtype=torch.uint8).view(part.dtype))
        else:
            parts.append((torch.rand(1, *part.shape) + 0.5).to(part.dtype))
    return parts


# Of bfloat16, a scale and the sum of each group are rounded.
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float16, 2e-3)])
@pytest.mark.parametrize("coding", CODES, ids=repr)
def test_products_are_those_of_the_decoded_weights(coding: Coding, dtype: torch.dtype, error: float) -> None:
    parts = parts_of(coding)
    matrix = int8_matrix(coding, parts, COLS, dtype)
    weights = torch.empty(1, ROWS, COLS)
    coding.decode(parts, weights)
    for tokens in (1, 3, 17):
        x = (torch.randn(tokens, COLS) / 16).to(dtype)
        wanted, got = x.double() @ weights[0].double().T, matrix.multiply(x)
        assert got.dtype is dtype and got.shape == (tokens, ROWS)
        assert (got.double() - wanted).norm() < error * wanted.norm()


@pytest.mark.parametrize("coding", CODES, ids=repr)
def test_only_groups_of_columns_are_copied(coding: Coding) -> None:
    parts = parts_of(coding)
    own = parts[0].untyped_storage().data_ptr()
    memory = {codes.untyped_storage().data_ptr() for codes in int8_matrix(coding, parts, COLS, torch.bfloat16).codes}
    assert (memory == {own}) == is_one_group(coding, COLS) == (coding in (CODES[0], CODES[4]))


@pytest.mark.parametrize(
    ("coding", "cols"),
    [
        (Scaled(torch.float8_e4m3fn, 1), 320),
        (Scaled(torch.int8, 1), 328),  # torch would read behind the matrix
        (Scaled(torch.int8, 1, 16), 320),
        (Scaled(torch.int8, 1, 128), 144),
        (Grouped(8, 32, has_zeros=True), 320),
        (Grouped(8, 32, has_order=True), 320),
        (Grouped(4, 32), 320),
        (Float4(), 320),
    ],
    ids=repr,
)
def test_other_codes_are_not_multiplied(coding: Coding, cols: int) -> None:
    assert int8_columns(coding, cols) is None
