"""Codings: each decodes to the weights that its specification gives, whole and in ranges of rows."""

from __future__ import annotations

import pytest
import torch

from djinnd.weights.forms import coding as coding_module
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tests.support.coded import random_parts

CODINGS = [
    Scaled(torch.float8_e4m3fn, 128, 128),
    Scaled(torch.float8_e4m3fn, 1),
    Scaled(torch.float8_e4m3fn),
    Scaled(torch.int8, 1),
    Scaled(torch.int8, 1, 64),
    Grouped(4, 64),
    Grouped(4, 32, torch.bfloat16, has_zeros=True),
    Grouped(4, 64, has_zeros=True, has_order=True),
    Grouped(8, 128),
    Float4(),
    Float4(is_nvidia=True),
    GgufBlocks(8),
    GgufBlocks(12),
]


def test_fp8_scales_blocks_of_both_dimensions() -> None:
    codes = torch.ones(1, 3, 5).to(torch.float8_e4m3fn)
    out = torch.empty(1, 3, 5)
    Scaled(torch.float8_e4m3fn, 2, 4).decode([codes, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])], out)
    assert out[0].tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [3, 3, 3, 3, 4]]


def test_four_bits_have_the_even_column_in_the_low_half() -> None:
    out = torch.empty(1, 1, 4)
    Grouped(4, 4).decode([torch.tensor([[[0x10, 0xF8]]], dtype=torch.uint8), torch.full((1, 1, 1), 2.0).half()], out)
    assert out[0].tolist() == [[-16, -14, 0, 14]]


def test_zero_points_and_the_order_of_columns() -> None:
    coding = Grouped(8, 2, torch.float32, has_zeros=True, has_order=True)
    codes, zeros = torch.tensor([[[5, 5, 5, 5]]], dtype=torch.uint8), torch.tensor([[[1, 2]]], dtype=torch.uint8)
    out = torch.empty(1, 1, 4)
    order = torch.tensor([[[1, 0, 0, 1]]], dtype=torch.int32)
    coding.decode([codes, torch.tensor([[[10.0, 100.0]]]), zeros, order], out)
    assert out[0].tolist() == [[300, 40, 40, 300]]


def test_mxfp4_has_signs_halves_and_powers_of_two() -> None:
    codes = torch.zeros(1, 1, 16, dtype=torch.uint8)
    codes[0, 0, :2] = torch.tensor([0x71, 0x9F])  # 0.5, 6, -6, -0.5
    out = torch.empty(1, 1, 32)
    Float4().decode([codes, torch.full((1, 1, 1), 129, dtype=torch.uint8)], out)
    assert out[0, 0, :4].tolist() == [2, 24, -24, -2]


def test_nvfp4_has_scales_of_groups_and_of_the_whole() -> None:
    codes = torch.full((1, 1, 16), 0x22, dtype=torch.uint8)  # 1.0
    scales = torch.tensor([[[2.0, 4.0]]]).to(torch.float8_e4m3fn)
    out = torch.empty(1, 1, 32)
    Float4(is_nvidia=True).decode([codes, scales, torch.full((1, 1, 1), 0.5)], out)
    assert out[0, 0, [0, 16]].tolist() == [1, 2]


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_ranges_of_rows_decode_as_the_whole(coding: Coding, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, cols = 300, 256
    parts = random_parts(coding, rows, cols, stack=2)
    whole, pieces = torch.empty(2, rows, cols), torch.empty(2, cols, rows).transpose(1, 2)
    coding.decode(parts, whole)
    monkeypatch.setattr(coding_module, "PIECE", 1000)
    coding.decode(parts, pieces)
    assert whole.isfinite().all() and whole.std() > 0
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_results_are_rounded_once(coding: Coding) -> None:
    torch.manual_seed(0)
    parts = random_parts(coding, 130, 256)
    exact, rounded = torch.empty(1, 130, 256), torch.empty(1, 130, 256, dtype=torch.bfloat16)
    coding.decode(parts, exact)
    coding.decode(parts, rounded)
    assert torch.equal(exact.bfloat16(), rounded)
    assert coding.nbytes(130, 256) == sum(part.nbytes for part in parts)
