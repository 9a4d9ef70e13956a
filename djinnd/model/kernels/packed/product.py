"""y = x Wᵀ + b for a few rows of x, with W read in packed form, which has three quarters of the bytes of bf16.

Such products are bound by reading W. The low and high halves of a group of weights are decoded to two tiles, and each
is multiplied by the matching columns of x, so nothing is interleaved. One row is multiplied on the ordinary cores,
straight from registers; up to FEW_ROWS rows are multiplied on the tensor cores.

Weights outside of their unit's window decode to a wrong number, and patches hold the right ones. The output is
corrected instead of the tile: y[row] += x[col] * (weight - decoded number), over the patches of a program's rows.

    partial     float32 [splits, tokens, rows], if the columns are divided among several programs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinn_client.handover.packed import FIRST_BASE, GROUP, STRIPE, PackedForm, Unit
from djinnd.model.kernels.launching.gpu import processors
from djinnd.model.kernels.launching.interpreter import INTERPRETED, dot
from djinnd.model.kernels.packed.code import decode_middle, decode_wide, load_patches, window_scale
from djinnd.model.kernels.packed.rows import columns_there, load_bounds, patch_range, patch_values, row_step, rows_of
from djinnd.model.tuning import FEW_ROWS

MAX_SPLITS = 8
PATCHES = 32  # patches applied at once; nearly all programs have fewer


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Rows of W and pairs of its columns in a tile, Triton's launch options, and the number of programs that share the
    columns."""

    rows: int
    pairs: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def multiply_vector(
    acc, sm, nibbles, x, shift, FIRST: tl.constexpr, LAST: tl.constexpr, ROW_PAIRS: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """Adds the products of the pairs [FIRST, LAST) of these rows to acc [ROWS, PAIRS], element by element, in tiles."""
    for start in tl.range(FIRST, LAST, PAIRS, num_stages=STAGES):
        pair = start + tl.arange(0, PAIRS)
        low = pair // 64 * 128 + pair % 64
        # A thread loads eight bytes of W, and the eight numbers of x that match them: no exchange between threads.
        pair_8, low_8 = tl.max_contiguous(pair, 8)[None, :], tl.max_contiguous(low, 8)[None, :]
        if STEP > 1 or ROW_PAIRS % PAIRS:
            low_there, high_there = columns_there(pair, shift, ROW_PAIRS, STEP)
            low_x = tl.load(x + (low - shift), mask=low_there, other=0.0)[None, :]
            high_x = tl.load(x + (low - shift) + 64, mask=high_there, other=0.0)[None, :]
        else:
            low_x = tl.load(x + low)[None, :]
            high_x = tl.load(x + low + 64)[None, :]
        if ROW_PAIRS % PAIRS:
            there = pair < ROW_PAIRS
            low_rest = tl.load(sm + low_8, mask=there[None, :], other=0)
            high_rest = tl.load(sm + 64 + low_8, mask=there[None, :], other=0)
            nibble = tl.load(nibbles + pair_8, mask=there[None, :], other=0)
        else:
            low_rest = tl.load(sm + low_8)
            high_rest = tl.load(sm + 64 + low_8)
            nibble = tl.load(nibbles + pair_8)
        acc += decode_wide(low_rest, nibble, False, PLAINLY) * low_x.to(tl.float32)
        acc += decode_wide(high_rest, nibble, True, PLAINLY) * high_x.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["number", "offset"])
def vector_kernel(
    sm, nibbles, bases, stripes, patches, x, bias, out, number, offset, capacity, rows,
    COLS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, PATCHES: tl.constexpr,
    STRIPE: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by one row of x. Bounds, patches and biases are loaded early, so that the end of the
    program does not wait for them."""
    first_row, last_row, shift = rows_of(tl.program_id(0), rows, ROWS, STEP)
    local = tl.arange(0, ROWS) * STEP
    row = tl.minimum(first_row + local, last_row)[:, None].to(tl.int64)
    sm += row * COLS - shift
    nibbles += row * (COLS // 2) - shift // 2
    ROW_PAIRS: tl.constexpr = COLS // 2 + 32 * (STEP - 1)
    HALF: tl.constexpr = (ROW_PAIRS // 2 + PAIRS - 1) // PAIRS * PAIRS
    bounds = load_bounds(stripes, first_row, tl.minimum(first_row + (ROWS - 1) * STEP + 1, rows), STRIPE)
    acc = tl.zeros([ROWS, PAIRS], tl.float32)
    acc = multiply_vector(acc, sm, nibbles, x, shift, 0, HALF, ROW_PAIRS, STEP, PAIRS, STAGES, PLAINLY)
    first, end = patch_range(bounds, capacity)
    index, bits = load_patches(patches, first + tl.arange(0, PATCHES), end)
    there = first_row + local < rows
    if BIAS:
        added = tl.load(bias + first_row + local, mask=there, other=0.0).to(tl.float32)
    acc = multiply_vector(acc, sm, nibbles, x, shift, HALF, ROW_PAIRS, ROW_PAIRS, STEP, PAIRS, STAGES, PLAINLY)
    base = tl.load(bases + number)
    y = tl.sum(acc, 1) * window_scale(base)

    for at in range(first + PATCHES, end + PATCHES, PATCHES):
        patched, col, is_weight, was_weight = patch_values(index, bits, offset, base, COLS)
        share = tl.load(x + col).to(tl.float32) * (is_weight.to(tl.float32) - was_weight.to(tl.float32))
        for i in tl.static_range(ROWS):  # one lane a patch; with a tile [rows, patches] each lane would do all patches
            mine = patched == first_row + i * STEP
            y += tl.where(local == i * STEP, tl.sum(tl.where(mine, share, 0.0), 0), 0.0)
        index, bits = load_patches(patches, at + tl.arange(0, PATCHES), end)
    if BIAS:
        y += added
    tl.store(out + first_row + local, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["number", "offset", "tokens"])
def matrix_kernel(
    sm, nibbles, bases, stripes, patches, x, bias, out, number, offset, capacity, rows, tokens,
    COLS: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    PATCHES: tl.constexpr, STRIPE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    PLAINLY: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by the rows of x, over one of SPLITS shares of the columns. If there are several,
    sum_kernel adds the bias."""
    first_row, last_row, shift = rows_of(tl.program_id(0), rows, ROWS, STEP)
    split = tl.program_id(1)
    row = tl.minimum(first_row + tl.arange(0, ROWS) * STEP, last_row)[None, :]
    token = tl.arange(0, TOKENS)[:, None]
    sm += row.to(tl.int64) * COLS - shift
    nibbles += row.to(tl.int64) * (COLS // 2) - shift // 2
    x += token * COLS
    base = tl.load(bases + number)
    bounds = load_bounds(stripes, first_row, tl.minimum(first_row + (ROWS - 1) * STEP + 1, rows), STRIPE)
    first, end = patch_range(bounds, capacity)
    first += split * PATCHES
    index, bits = load_patches(patches, first + tl.arange(0, PATCHES), end)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    ROW_PAIRS: tl.constexpr = COLS // 2 + 32 * (STEP - 1)
    SPAN: tl.constexpr = (ROW_PAIRS + PAIRS * SPLITS - 1) // (PAIRS * SPLITS) * PAIRS
    begin = split * SPAN
    for start in tl.range(begin, tl.minimum(begin + SPAN, ROW_PAIRS), PAIRS, num_stages=STAGES):
        pair = start + tl.arange(0, PAIRS)
        low = pair // 64 * 128 + pair % 64
        low_there, high_there = columns_there(pair, shift, ROW_PAIRS, STEP)
        col = (low - shift)[None, :]
        low_x = tl.load(x + col, mask=(token < tokens) & low_there[None, :], other=0.0)
        high_x = tl.load(x + col + 64, mask=(token < tokens) & high_there[None, :], other=0.0)
        if ROW_PAIRS % PAIRS:
            there = pair < ROW_PAIRS
            low_rest = tl.load(sm + low[:, None], mask=there[:, None], other=0)
            high_rest = tl.load(sm + low[:, None] + 64, mask=there[:, None], other=0)
            nibble = tl.load(nibbles + pair[:, None], mask=there[:, None], other=0)
        else:
            low_rest = tl.load(sm + low[:, None])
            high_rest = tl.load(sm + low[:, None] + 64)
            nibble = tl.load(nibbles + pair[:, None])
        low_weight = decode_middle(low_rest, nibble, False, PLAINLY)
        high_weight = decode_middle(high_rest, nibble, True, PLAINLY)
        acc = dot(low_x, low_weight, acc, PLAINLY)
        acc = dot(high_x, high_weight, acc, PLAINLY)

    acc *= window_scale(base)
    local = tl.arange(0, ROWS)[None, :] * STEP
    for at in tl.range(first + SPLITS * PATCHES, end + SPLITS * PATCHES, SPLITS * PATCHES, num_stages=1):
        patched, col, is_weight, was_weight = patch_values(index, bits, offset, base, COLS)
        part = tl.load(x + col[None, :], mask=token < tokens, other=0.0)
        mine = (patched - first_row)[:, None] == local
        # Two products: the difference of the weights may not fit bf16, and 0 times an infinite weight would be NaN.
        acc = dot(part, tl.where(mine, is_weight.to(tl.float32)[:, None], 0.0).to(part.dtype), acc, PLAINLY)
        acc = dot(part, tl.where(mine, -was_weight.to(tl.float32)[:, None], 0.0).to(part.dtype), acc, PLAINLY)
        index, bits = load_patches(patches, at + tl.arange(0, PATCHES), end)

    there = first_row + local < rows
    if BIAS and SPLITS == 1:
        acc += tl.load(bias + first_row + local, mask=there, other=0.0).to(tl.float32)
    out += (split * tokens + token).to(tl.int64) * rows + first_row
    tl.store(out + local, acc.to(out.dtype.element_ty), mask=(token < tokens) & there)


@triton.jit
def sum_kernel(partial, bias, out, elements, rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Sums over the splits, in their order, and adds the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < elements
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial + split * elements + at, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + at % rows, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def product_fits(unit: Unit) -> bool:
    """Returns True if packed_product supports the unit: its rows must be whole halves of groups."""
    return unit.cols % (GROUP // 2) == 0


def product_tiles(tokens: int, unit: Unit, processors: int) -> ProductTiles:
    """Tiles chosen by a sweep on an H200. Columns are divided if the rows alone would give fewer than two programs a
    processor."""
    if tokens == 1:
        return ProductTiles(rows=2, pairs=256, warps=1, stages=1)
    programs = triton.cdiv(unit.rows, 64)
    splits = min(max(round(2 * processors / programs), 1), MAX_SPLITS, triton.cdiv(unit.cols, 2 * 128))
    return ProductTiles(rows=64, pairs=128, warps=4, stages=3, splits=splits)


def packed_product(
    form: PackedForm,
    number: int,
    packed: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """x bf16 [tokens, cols] times the transposed unit `number` of packed (uint8 [form.nbytes]), plus bias bf16 [rows]
    → bf16 [tokens, rows].

    At most FEW_ROWS tokens, and units for which `product_fits`. Sums in float32, in an order that depends only on the
    shapes and the device, and rounds once. In a CUDA graph, a replay reads the contents of the buffer at that time.
    `tiles` is derived from the shapes; benchmarks set it.
    """
    unit, tokens = form.units[number], len(x)
    assert product_fits(unit) and 0 < tokens <= FEW_ROWS and x.shape[1] == unit.cols and x.is_contiguous()
    assert packed.numel() == form.nbytes and x.dtype == torch.bfloat16
    assert bias is None or (bias.shape == (unit.rows,) and bias.is_contiguous())
    tiles = tiles or product_tiles(tokens, unit, processors(x.device))
    out = torch.empty(tokens, unit.rows, dtype=x.dtype, device=x.device)
    arguments = (
        form.sm_view(packed)[unit.offset :],
        form.nibbles_view(packed)[unit.offset // 2 :],
        form.head_view(packed)[FIRST_BASE:],
        form.stripes_view(packed)[form.first_stripe(number) :],
        form.patches_view(packed),
        x,
        x if bias is None else bias,
    )
    step = row_step(unit.cols)
    options = {
        "COLS": unit.cols, "STEP": step, "ROWS": tiles.rows, "PAIRS": tiles.pairs, "STRIPE": STRIPE,
        "STAGES": tiles.stages, "BIAS": bias is not None, "PLAINLY": INTERPRETED, "num_warps": tiles.warps,
    }  # fmt: skip
    programs = sum(triton.cdiv(len(range(first, unit.rows, step)), tiles.rows) for first in range(step))
    if tokens == 1:
        vector_kernel[(programs,)](
            *arguments, out, number, unit.offset, form.capacity, unit.rows, PATCHES=PATCHES, **options
        )
        return out
    target = out
    if tiles.splits > 1:
        target = torch.empty(tiles.splits, tokens, unit.rows, dtype=torch.float32, device=x.device)
    matrix_kernel[(programs, tiles.splits)](
        *arguments, target, number, unit.offset, form.capacity, unit.rows, tokens,
        TOKENS=FEW_ROWS, PATCHES=PATCHES, SPLITS=tiles.splits, **options,
    )  # fmt: skip
    if tiles.splits > 1:
        sum_kernel[(triton.cdiv(out.numel(), 512),)](
            target, arguments[-1], out, out.numel(), unit.rows,
            SPLITS=tiles.splits, BLOCK=512, BIAS=bias is not None, num_warps=4,
        )  # fmt: skip
    return out
