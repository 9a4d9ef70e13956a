"""y = x Wᵀ + b for a few rows of x, with W read in its code.

Such products are bound by reading W. Weights are decoded in registers: a byte that holds two columns becomes two
tiles, and each is multiplied by the matching columns of x, so nothing is interleaved. One row is multiplied on the
ordinary cores with weights in float32; up to FEW_ROWS rows on the tensor cores with weights rounded to x's dtype.

    partial     float32 [splits, tokens, rows], if the columns are divided among several programs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.coded.facts import Facts, arguments, facts_of
from djinnd.model.kernels.coded.loads import load_x
from djinnd.model.kernels.coded.numbers import rounded
from djinnd.model.kernels.coded.tiles import load_weights, row_products, unit_of
from djinnd.model.kernels.launching.gpu import processors
from djinnd.model.kernels.launching.interpreter import INTERPRETED, dot
from djinnd.model.tuning import FEW_ROWS, UNROLLED
from djinnd.weights.forms.coding import Coding

MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Rows of W and bytes of their codes in a tile, bytes of a run, Triton's launch options, and the number of programs
    that share the columns."""

    rows: int
    width: int
    run: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def coded_vector_kernel(
    codes, scales, third, fourth, x, words, bias, out, rows, step,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PLAINLY: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by one row of x. UNROLLED: tiles of a row that are loaded before the first of them is
    multiplied."""
    first_row = tl.program_id(0) * ROWS
    local = tl.arange(0, ROWS)
    row = tl.minimum(first_row + local, rows - 1)
    WIDTH: tl.constexpr = RUNS * RUN * UNROLLED
    MASKED: tl.constexpr = ROW % WIDTH != 0
    acc = tl.zeros([ROWS, RUNS], tl.float32)
    for begin in tl.range(0, ROW, WIDTH, num_stages=STAGES):
        for tile in tl.static_range(UNROLLED):
            acc += row_products(
                codes, scales, third, fourth, x, words, row, begin + tile * RUNS * RUN, step,
                KIND, ROW, STRIDE, SPAN, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED,
            )  # fmt: skip
    y = tl.sum(acc, 1) * unit_of(KIND)
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + first_row + local, rounded(y, out.dtype.element_ty, PLAINLY), mask=first_row + local < rows)


@triton.jit(do_not_specialize=["tokens"])
def coded_matrix_kernel(
    codes, scales, third, fourth, x, words, bias, out, rows, step, tokens, row_stride,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PLAINLY: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by the rows of x, over one of SPLITS shares of the columns. If there are several,
    coded_sum_kernel adds the bias."""
    first_row, split = tl.program_id(0) * ROWS, tl.program_id(1)
    local, token = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    row = tl.minimum(first_row + local, rows - 1)
    COLS: tl.constexpr = ROW * 2 if SPAN else ROW
    WIDTH: tl.constexpr = RUNS * RUN
    # Rows past the end read the last row of x again: their sums are not stored.
    line = tl.minimum(token, tokens - 1)[:, None]
    x += line * COLS
    words += line * ROW
    MASKED: tl.constexpr = ROW % WIDTH != 0
    SPAN_OF_SPLIT: tl.constexpr = (ROW + WIDTH * SPLITS - 1) // (WIDTH * SPLITS) * WIDTH
    begin = split * SPAN_OF_SPLIT
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + SPAN_OF_SPLIT, ROW), WIDTH, num_stages=STAGES):
        low_x, high_x = load_x(x, words, start + tl.arange(0, WIDTH)[None, :], SPAN, ROW, MASKED)
        low, high = load_weights(
            codes, scales, third, fourth, row, start, step,
            KIND, ROW, STRIDE, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED,
        )  # fmt: skip
        low = rounded(low, x.dtype.element_ty, PLAINLY)
        acc = dot(low_x, tl.trans(tl.reshape(low, (ROWS, WIDTH))), acc, PLAINLY)
        if SPAN:
            high = rounded(high, x.dtype.element_ty, PLAINLY)
            acc = dot(high_x, tl.trans(tl.reshape(high, (ROWS, WIDTH))), acc, PLAINLY)
    if BIAS and SPLITS == 1:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    y = rounded(acc, out.dtype.element_ty, PLAINLY)
    out += (split * tokens + token).to(tl.int64)[:, None] * row_stride + first_row
    tl.store(out + local[None, :], y, mask=(token < tokens)[:, None] & (first_row + local < rows)[None, :])


@triton.jit
def coded_sum_kernel(
    partial, bias, out, rows, row_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """Sums over the splits, in their order, and adds the bias."""
    at, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    there = at < rows
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * tl.num_programs(1) + token) * rows + at, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * row_stride + at, rounded(total, out.dtype.element_ty, PLAINLY), mask=there)


def product_tiles(tokens: int, rows: int, facts: Facts, element_size: int, processors: int) -> ProductTiles:
    """Tiles for x of `tokens` rows, with numbers of `element_size` bytes. Columns are divided if there are too few
    rows to keep the device busy."""
    widest = triton.next_power_of_2(facts.row_bytes)
    if tokens == 1:
        # Measured on an H200, FP8 and MXFP4, 4,096 and 28,672 rows: within 6 % of the best of 36 tiles. A program for
        # each row gives a processor more warps, and these hide how long decoding takes.
        run = min(facts.run, 16 // element_size, widest)
        return ProductTiles(rows=1, width=min(512, widest), run=run, warps=2, stages=1)
    # Measured on the same matrices with 4 and 16 rows: the widths, and 4 programs or more for each processor. float32
    # takes long to compile.
    width = min(32 if element_size == 4 else 64 if facts.span else 256, widest)
    splits = triton.cdiv(4 * processors, triton.cdiv(rows, 64))
    splits = min(splits, MAX_SPLITS, triton.cdiv(facts.row_bytes, 2 * width))
    return ProductTiles(rows=64, width=width, run=min(facts.run, width), warps=4, stages=3, splits=splits)


def product_fits(coding: Coding, rows: int, cols: int) -> bool:
    """Returns True if `coded_product` multiplies by matrices of this shape."""
    return facts_of(coding, rows, cols) is not None


def coded_product(
    coding: Coding,
    parts: Sequence[Tensor],
    x: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """x [tokens, cols] times the transposed matrix [rows, cols] of the parts, plus bias [rows] → out [tokens, rows]. x,
    bias and out are of one dtype.

    parts: of one matrix, [1, *shape] each, for which `product_fits`. At most FEW_ROWS tokens. `out` may be some columns
    of a wider tensor. Sums in float32, in an order that depends only on the shapes and the device, and rounds once. In
    a CUDA graph, a replay reads the contents of the parts at that time. `tiles` is derived from the shapes; benchmarks
    set it.
    """
    tokens, cols = x.shape
    rows = parts[0].shape[1]
    facts = facts_of(coding, rows, cols)
    assert facts is not None and 0 < tokens <= FEW_ROWS and all(part.is_contiguous() for part in parts)
    assert [tuple(part.shape) for part in parts] == [(1, *each.shape) for each in coding.parts(rows, cols)]
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (tokens, rows) and out.stride(1) == 1
    assert bias is None or (bias.shape == (rows,) and bias.is_contiguous())
    added = x if bias is None else bias
    x = x.contiguous()
    tiles = tiles or product_tiles(tokens, rows, facts, x.element_size(), processors(x.device))
    words = x.view(torch.int32) if facts.span == 1 and x.element_size() == 2 else x
    run = min(tiles.run, facts.run)
    options = facts.options(x.device) | {
        "ROWS": tiles.rows, "RUNS": tiles.width // run, "RUN": run, "STAGES": tiles.stages,
        "BIAS": bias is not None, "PLAINLY": INTERPRETED, "num_warps": tiles.warps,
    }  # fmt: skip
    given, programs = arguments(facts, list(parts)), triton.cdiv(rows, tiles.rows)
    if tokens == 1:
        steps = triton.cdiv(facts.row_bytes, tiles.width)
        unrolled = triton.cdiv(steps, triton.cdiv(steps, UNROLLED))
        coded_vector_kernel[(programs,)](*given, x, words, added, out, rows, facts.step, UNROLLED=unrolled, **options)
        return out
    target = out
    if tiles.splits > 1:
        target = torch.empty(tiles.splits, tokens, rows, dtype=torch.float32, device=x.device)
    coded_matrix_kernel[(programs, tiles.splits)](
        *given, x, words, added, target, rows, facts.step, tokens, target.stride(-2),
        TOKENS=FEW_ROWS, SPLITS=tiles.splits, **options,
    )  # fmt: skip
    if tiles.splits > 1:
        coded_sum_kernel[(triton.cdiv(rows, 512), tokens)](
            target, added, out, rows, out.stride(0),
            SPLITS=tiles.splits, BLOCK=512, BIAS=bias is not None, PLAINLY=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return out
