"""Edits of rows in one launch: steering every block of a model would cost a decode step hundreds of small kernels."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.editing import CODES, EditRows

BLOCK = 2048
ADD, SCALE, REPLACE, CLAMP = (tl.constexpr(CODES[op]) for op in ("add", "scale", "replace", "clamp"))


# Parts of what a step has sent begin anywhere, and no step is to wait for a compiler.
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
    inverse = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)  # zeros are no direction
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
        # Chosen, not multiplied by nothing: what the op has no use for may be NaN.
        edited = tl.where(op == ADD, a + scale * v, a + shift * v)
        edited = tl.where(op == SCALE, a * scale, edited)
        edited = tl.where(op == REPLACE, v, edited)
        tl.store(row + at, edited.to(x.dtype.element_ty), mask=at < WIDTH)


def edit(target: Tensor, where: Tensor, edits: EditRows) -> None:
    """What `editing.apply` is asked for. The last dimension of target and bank has a stride of 1; there is an edit."""
    bank, width = edits.bank, target.shape[1]
    assert target.stride(1) == bank.stride(1) == 1 and bank.shape[1] == width
    edit_kernel[(len(where),)](
        target, where, edits.op, edits.scale, edits.low, edits.high, edits.value, bank,
        target.stride(0), bank.stride(0),
        WIDTH=width, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
