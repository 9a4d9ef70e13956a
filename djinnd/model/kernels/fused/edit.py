"""Edits rows in one launch. With tensor operations, steering every block would add hundreds of small kernels to a
decode step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.edit_rows import CODES, EditRows

BLOCK = 2048  # elements of a row that a program handles at once
ADD, SCALE, REPLACE, CLAMP = (tl.constexpr(CODES[op]) for op in ("add", "scale", "replace", "clamp"))


# The arguments are slices of a step's uploads with any alignment. Specialising on it would compile during a step.
@triton.jit(do_not_specialize_on_alignment=["where", "codes", "scales", "lows", "highs", "value"])
def edit_kernel(
    x, where, codes, scales, lows, highs, value, bank, x_row, bank_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    edit = tl.program_id(0)
    op = tl.load(codes + edit)
    scale = tl.load(scales + edit)
    row = x + tl.load(where + edit) * x_row
    values = bank + tl.load(value + edit) * bank_row

    product = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    if (op != ADD) & (op != SCALE) & (op != REPLACE):
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            a = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            v = tl.load(values + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            product += a * v
            square += v * v
    length = tl.sqrt(tl.sum(square, 0))
    inverse = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)  # a v of zeros has no direction
    along = tl.sum(product, 0) * inverse
    if op == CLAMP:
        inside = tl.minimum(tl.maximum(along, tl.load(lows + edit)), tl.load(highs + edit))
        shift = (inside - along) * inverse
    else:
        shift = -scale * along * inverse

    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        # `where` instead of multiplying by 0: numbers that the op does not use may be NaN.
        edited = tl.where(op == ADD, a + scale * v, a + shift * v)
        edited = tl.where(op == SCALE, a * scale, edited)
        edited = tl.where(op == REPLACE, v, edited)
        tl.store(row + at, edited.to(x.dtype.element_ty), mask=at < WIDTH)


def edit(target: Tensor, where: Tensor, edits: EditRows) -> None:
    """Implements `editing.apply` for at least one edit. The last dimension of target and bank has stride 1."""
    bank, width = edits.bank, target.shape[1]
    assert target.stride(1) == bank.stride(1) == 1 and bank.shape[1] == width
    edit_kernel[(len(where),)](
        target, where, edits.op, edits.scale, edits.low, edits.high, edits.value, bank,
        target.stride(0), bank.stride(0),
        WIDTH=width, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
