from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from djinn_client.protocol.fields.edits import Op
from djinnd.model.edit_rows import CODES, EditRows
from djinnd.model.whitebox.editing import apply
from tests.support import ops
from tests.support.paged import same_bytes

OPS: tuple[Op, ...] = get_args(Op)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS, WIDTH = 12, 96


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(
    ops: list[Op], bank: Tensor, *, scale: float = 1.0, low: float = -math.inf, high: float = math.inf
) -> EditRows:
    """Edits in which edit i uses row i of the bank, or its only row."""
    n = len(ops)
    codes = torch.tensor([CODES[op] for op in ops], dtype=torch.int32)
    value = torch.arange(n) if len(bank) > 1 else torch.zeros(n, dtype=torch.int64)
    return EditRows(codes, *(torch.full((n,), float(each)) for each in (scale, low, high)), value, bank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bank_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_each_op_computes_its_formula(op: Op, dtype: torch.dtype, bank_dtype: torch.dtype) -> None:
    before, bank = random(TOKENS, WIDTH).to(dtype), random(3, WIDTH, seed=1).to(bank_dtype)
    where = torch.tensor([7, 0, 11])
    target = before.clone()
    apply(target, where, rows_of([op] * 3, bank, scale=1.7, low=3.0, high=3.5))
    expected = ops.act(op, bank.float(), 1.7, 3.0, 3.5)(before[where].float()).to(dtype)
    for at, wanted in zip(where.tolist(), expected, strict=True):
        torch.testing.assert_close(target[at], wanted)
        if op in ("add", "scale", "replace"):
            assert torch.equal(target[at], wanted)
        assert not torch.equal(target[at], before[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_together_do_what_each_does_alone(dtype: torch.dtype) -> None:
    ops = [*OPS, *reversed(OPS)]
    where = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))[: len(ops)]
    edits = rows_of(ops, random(len(ops), WIDTH, seed=1), low=-0.1, high=0.1)
    edits = replace(edits, scale=random(len(ops), seed=3), value=edits.value.flip(0))
    together = random(TOKENS, WIDTH).to(dtype)
    alone = together.clone()
    apply(together, where, edits)
    for i in range(len(ops)):
        own = (each[i : i + 1] for each in (edits.op, edits.scale, edits.low, edits.high, edits.value))
        apply(alone, where[i : i + 1], EditRows(*own, edits.bank))
    assert same_bytes(together, alone)


def test_rows_without_an_edit_keep_their_bytes() -> None:
    target = random(TOKENS, WIDTH).bfloat16()
    target.view(torch.int16)[3] = 0x7FC1  # a NaN with a payload
    target[4], target[5] = math.inf, -0.0
    before = target.clone()
    where = torch.tensor([0, 2, 6, 8, 10])
    apply(target, where, rows_of(list(OPS), random(5, WIDTH, seed=1), scale=2.0, low=1.0, high=2.0))
    others = [at for at in range(TOKENS) if at not in where.tolist()]
    assert same_bytes(target[others], before[others])
    assert all(not torch.equal(target[at], before[at]) for at in where.tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_row_and_replace_removes_it(bad: float) -> None:
    target = random(TOKENS, WIDTH)
    target[1], target[2, 5] = bad, bad
    bank = random(5, WIDTH, seed=1)
    apply(target, torch.arange(5), rows_of(["scale", "replace", "add", "project_out", "clamp"], bank, low=0, high=0))
    assert torch.equal(target[1], bank[1])
    assert not bool(target[2, 5].isfinite()) and int(target.isfinite().logical_not().sum()) == 1


def test_an_op_ignores_fields_that_it_does_not_use() -> None:
    nothing = torch.full((1, WIDTH), math.nan)
    target = random(3, WIDTH)
    before = target.clone()
    edits = rows_of(["scale"] * 3, nothing, scale=0.5, low=math.nan, high=math.nan)
    apply(target, torch.arange(3), edits)
    assert torch.equal(target, before * 0.5)
    values = random(3, WIDTH, seed=1)
    apply(target, torch.arange(3), rows_of(["replace"] * 3, values, scale=math.nan, low=math.nan, high=math.nan))
    assert torch.equal(target, values)


@pytest.mark.parametrize("op", ["project_out", "clamp"])
def test_a_direction_of_zeros_changes_nothing(op: Op) -> None:
    target = random(2, WIDTH)
    before = target.clone()
    apply(target, torch.arange(2), rows_of([op] * 2, torch.zeros(1, WIDTH), low=1.0, high=2.0))
    assert torch.equal(target, before)


def test_project_out_leaves_nothing_along_the_direction() -> None:
    """The length of the vector that gives the direction does not matter."""
    for length in (1e-12, 1.0, 1e12):
        target, vector = random(4, WIDTH), random(1, WIDTH, seed=1) * length
        apply(target, torch.arange(4), rows_of(["project_out"] * 4, vector))
        assert (target @ (vector[0] / vector.norm())).abs().max().item() < 1e-5


def test_clamp_keeps_values_within_its_bounds() -> None:
    before, vector = random(6, WIDTH), random(1, WIDTH, seed=1)
    along = before @ (vector[0] / vector.norm())
    for low, high in ((-math.inf, 0.3), (-0.3, math.inf), (-0.3, 0.3), (-math.inf, math.inf)):
        target = before.clone()
        apply(target, torch.arange(6), rows_of(["clamp"] * 6, vector, low=low, high=high))
        torch.testing.assert_close(target @ (vector[0] / vector.norm()), along.clamp(low, high))
        within = (along >= low) & (along <= high)
        assert torch.equal(target[within], before[within])


def test_a_sum_is_rounded_once() -> None:
    """v is a little more than half of bfloat16's step at 1. Rounded alone it would be exactly half, and lost."""
    target = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    apply(target, torch.arange(1), rows_of(["add"], torch.full((1, WIDTH), (1 + 2**-9) * 2**-8)))
    assert bool((target == 1 + 2**-7).all())


def test_the_target_may_be_a_view() -> None:
    whole = random(TOKENS, 3 * WIDTH)
    before = whole.clone()
    target = whole[:, WIDTH : 2 * WIDTH]
    apply(target, torch.tensor([4]), rows_of(["scale"], torch.zeros(1, WIDTH), scale=3.0))
    before[4, WIDTH : 2 * WIDTH] *= 3.0
    assert torch.equal(whole, before)


def test_no_edits_change_nothing() -> None:
    target = random(TOKENS, WIDTH)
    before = target.clone()
    apply(target, torch.zeros(0, dtype=torch.int64), rows_of([], random(1, WIDTH)))
    assert torch.equal(target, before)
