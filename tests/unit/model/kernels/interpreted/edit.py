"""Compares the kernel of edits, under Triton's interpreter, with the same edits by torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from djinnd.model.edit_rows import CODES, EditRows
from djinnd.model.kernels.fused.edit import edit
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.whitebox.editing import apply
from tests.support.paged import same_bytes

assert INTERPRETED

TOKENS, EDITS = 9, 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def scene(dtype: torch.dtype, bank_dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, EditRows]:
    """A target that is a view of a larger tensor, and seven edits with all ops. Edits share values; one value is
    zeros."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(TOKENS, width + 8, generator=generator).to(dtype)[:, 3 : 3 + width]
    bank = torch.randn(4, width, generator=generator).to(bank_dtype)
    bank[3] = 0
    codes = torch.tensor([*CODES.values(), CODES["project_out"], CODES["clamp"]], dtype=torch.int32)
    scale = torch.randn(EDITS, generator=generator)
    low, high = torch.full((EDITS,), -0.1), torch.full((EDITS,), 0.1)
    high[4] = math.inf
    where = torch.randperm(TOKENS, generator=generator)[:EDITS]
    return target, where, EditRows(codes, scale, low, high, torch.tensor([0, 1, 2, 0, 1, 3, 3]), bank)


@pytest.mark.parametrize("width", [1, 100, 5000])
@pytest.mark.parametrize(
    ("dtype", "bank_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_the_kernel_agrees_with_torch(dtype: torch.dtype, bank_dtype: torch.dtype, width: int) -> None:
    target, where, edits = scene(dtype, bank_dtype, width)
    before = target.clone()
    wanted = target.clone()
    apply(wanted, where, edits)
    edit(target, where, edits)
    torch.testing.assert_close(target, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    others = [at for at in range(TOKENS) if at not in where.tolist()]
    unmoved = [*others, *where[5:].tolist()]  # along zeros
    assert same_bytes(target[unmoved], before[unmoved])
    if dtype == bank_dtype:  # the interpreter truncates where a GPU rounds
        assert same_bytes(target[where[3]], edits.bank[0])


def test_nan_stays_in_its_row() -> None:
    target, where, edits = scene(torch.float32, torch.float32, 100)
    target[where[0], 5] = math.nan
    target[where[3]] = math.inf
    edits.bank[1] = math.nan  # the value of scale, which ignores it, and of clamp
    edit(target, where, edits)
    finite = target.isfinite().all(1)
    assert [i for i in range(EDITS) if not finite[where[i]]] == [0, 4]
    assert int(target[where[0]].isfinite().sum()) == 99
