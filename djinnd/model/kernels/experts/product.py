"""The products of pairs with their experts' matrices, and the weighted sum over a row's experts.

    vector_kernel     a program multiplies some rows of W by one pair; nothing is grouped
    grouped_kernel    a program multiplies some rows of W by a tile of pairs of one expert, on the tensor cores
    sum_kernel        adds the results of a row's pairs, in the order of its picks

Sums are in float32. A pair's sums depend on the shape of the launch, but not on the other pairs. In a first product,
rows of gate and up take turns in a tile, whatever their order in memory. So both numbers of a result are in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from djinnd.model.kernels.coded.kinds import PLAIN
from djinnd.model.kernels.coded.loads import load_part, load_wide_x, load_x
from djinnd.model.kernels.coded.numbers import rounded
from djinnd.model.kernels.coded.tiles import load_weights, row_products, unit_of
from djinnd.model.kernels.experts.gating import NONE, RELU_SQUARED, activated
from djinnd.model.kernels.experts.grouping import load_picks, real_pairs
from djinnd.model.kernels.launching.interpreter import dot


@triton.jit
def weight_rows(first, rows, ACTIVATION: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr):
    """The rows of W in a tile, int32 [ROWS]. Rows past the end are the last row again."""
    row = tl.minimum(first + tl.arange(0, ROWS), rows - 1)
    if ACTIVATION <= RELU_SQUARED or TURNS:
        return row
    else:
        return row // 2 + row % 2 * (rows // 2)


@triton.jit
def load_transposed(weights, first, rows, column, ROWS: tl.constexpr, COLS: tl.constexpr):
    """→ W [ROWS, *column]; 0 outside of W. In memory, each element lies beside that of the next row. column: [1, …]."""
    local = tl.arange(0, ROWS)
    row = first + (local[:, None, None] if len(column.shape) == 3 else local[:, None])
    return tl.load(weights + (column.to(tl.int64) * rows + row), mask=(row < rows) & (column < COLS), other=0.0)


@triton.jit
def of_expert(
    codes, scales, third, fourth, expert, rows, step,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """The parts of one expert's matrix."""
    expert = expert.to(tl.int64)
    codes += expert * rows * STRIDE
    if KIND != PLAIN:
        scales += expert * tl.cdiv(rows, step) * GROUPS
        if ZEROS:
            third += expert * rows * GROUPS
        elif not ORDER:
            third += expert
        if ORDER:
            fourth += expert * (ROW * 2 if SPAN else ROW)
    return codes, scales, third, fourth


@triton.jit
def store_result(
    y, bias, out, pair, there, first, rows, alpha, limit,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """y: float32 [pairs, ROWS]; bias: the same shape, or 0. Adds the bias, activates, and stores."""
    y = rounded(y + bias, out.dtype.element_ty, PLAINLY)
    if ACTIVATION <= RELU_SQUARED:  # no gate
        if ACTIVATION != NONE:
            positive = tl.maximum(y.to(tl.float32), 0.0)
            y = rounded(positive * positive, out.dtype.element_ty, PLAINLY)
        at = first + tl.arange(0, ROWS)
        width = rows
    else:
        gate, up = tl.split(tl.reshape(y, (y.shape[0], ROWS // 2, 2)))
        y = activated(gate, up, alpha, limit, ACTIVATION, PLAINLY)
        at = first // 2 + tl.arange(0, ROWS // 2)
        width = rows // 2
    out += pair.to(tl.int64)[:, None] * width + at[None, :]
    tl.store(out, y, mask=there[:, None] & (at < width)[None, :])


@triton.jit(do_not_specialize=["pairs", "experts"])
def vector_kernel(
    picked, real, codes, scales, third, fourth, bias, x, words, out, pairs, experts, rows, step, alpha, limit,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    PLAINLY: tl.constexpr, ACTIVATION: tl.constexpr, TURNS: tl.constexpr, PICKS: tl.constexpr, SHARED: tl.constexpr,
    PADDED: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """SHARED: x has a row for each row of `picked`, not for each pair. UNROLLED: tiles of a row that are loaded before
    the first of them is multiplied."""
    pair, first = tl.program_id(1), tl.program_id(0) * ROWS
    if pair >= real_pairs(real, pairs, PICKS, PADDED):
        return
    expert = load_picks(picked, pair, pairs, experts)
    if expert < 0:
        return
    codes, scales, third, fourth = of_expert(
        codes, scales, third, fourth, expert, rows, step, KIND, ROW, STRIDE, SPAN, GROUPS, ZEROS, ORDER
    )
    row = weight_rows(first, rows, ACTIVATION, TURNS, ROWS)
    line = (pair // PICKS if SHARED else pair).to(tl.int64)
    x += line * (ROW * 2 if SPAN else ROW)
    words += line * ROW
    WIDTH: tl.constexpr = RUNS * RUN * UNROLLED
    MASKED: tl.constexpr = ROW % WIDTH != 0
    acc = tl.zeros([ROWS, RUNS, RUN] if KIND == PLAIN else [ROWS, RUNS], tl.float32)
    for begin in tl.range(0, ROW, WIDTH, num_stages=STAGES):
        for tile in tl.static_range(UNROLLED):
            start = begin + tile * RUNS * RUN
            if KIND == PLAIN:
                byte = (start + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :])[None, :, :]
                row_x, _ = load_wide_x(x, words, byte, SPAN, ROW, MASKED)
                if TRANSPOSED:
                    w = load_transposed(codes, first, rows, byte, ROWS, ROW)
                else:
                    w = load_part(codes + (row.to(tl.int64)[:, None, None] * ROW + byte), byte < ROW, MASKED)
                acc += w.to(tl.float32) * row_x
            else:
                acc += row_products(
                    codes, scales, third, fourth, x, words, row, start, step,
                    KIND, ROW, STRIDE, SPAN, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED,
                )  # fmt: skip
    y = tl.sum(tl.sum(acc, 2), 1) if KIND == PLAIN else tl.sum(acc, 1) * unit_of(KIND)
    added = tl.load(bias + expert * rows + row).to(tl.float32)[None, :] if BIAS else 0.0
    place = pair + tl.zeros([1], tl.int32)
    store_result(y[None, :], added, out, place, place >= 0, first, rows, alpha, limit, ROWS, ACTIVATION, PLAINLY)


@triton.jit(do_not_specialize=["pairs", "experts"])
def grouped_kernel(
    order, owners, codes, scales, third, fourth, bias, x, words, out, pairs, experts, rows, step, alpha, limit,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    PLAINLY: tl.constexpr, ACTIVATION: tl.constexpr, TURNS: tl.constexpr, PICKS: tl.constexpr, SHARED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """order, owners: of `group_pairs`. They may hold anything after a launch that was only listed (launches.py), so
    their numbers are bounded."""
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    expert = tl.load(owners + tile)
    if (expert < 0) | (expert >= experts):
        return
    codes, scales, third, fourth = of_expert(
        codes, scales, third, fourth, expert, rows, step, KIND, ROW, STRIDE, SPAN, GROUPS, ZEROS, ORDER
    )
    pair = tl.load(order + tile * SIZE + tl.arange(0, SIZE))
    there = (pair >= 0) & (pair < pairs)
    pair = tl.where(there, pair, 0)
    line = (pair // PICKS if SHARED else pair).to(tl.int64)[:, None]
    x += line * (ROW * 2 if SPAN else ROW)
    words += line * ROW
    row = weight_rows(first, rows, ACTIVATION, TURNS, ROWS)
    WIDTH: tl.constexpr = RUNS * RUN
    MASKED: tl.constexpr = ROW % WIDTH != 0
    acc = tl.zeros([SIZE, ROWS], tl.float32)
    for start in tl.range(0, ROW, WIDTH, num_stages=STAGES):
        at = start + tl.arange(0, WIDTH)
        low_x, high_x = load_x(x, words, at[None, :], SPAN, ROW, MASKED)
        if KIND == PLAIN:
            if TRANSPOSED:
                w = load_transposed(codes, first, rows, at[None, :], ROWS, ROW)
                acc = dot(low_x, tl.trans(w), acc, PLAINLY)
            else:
                place = codes + (row.to(tl.int64)[:, None] * ROW + at[None, :])
                acc = dot(low_x, tl.trans(load_part(place, (at < ROW)[None, :], MASKED)), acc, PLAINLY)
        else:
            low, high = load_weights(
                codes, scales, third, fourth, row, start, step,
                KIND, ROW, STRIDE, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, MASKED,
            )  # fmt: skip
            low = rounded(low, x.dtype.element_ty, PLAINLY)
            acc = dot(low_x, tl.trans(tl.reshape(low, (ROWS, WIDTH))), acc, PLAINLY)
            if SPAN:
                high = rounded(high, x.dtype.element_ty, PLAINLY)
                acc = dot(high_x, tl.trans(tl.reshape(high, (ROWS, WIDTH))), acc, PLAINLY)
    added = tl.load(bias + expert * rows + row).to(tl.float32)[None, :] if BIAS else 0.0
    store_result(acc, added, out, pair, there, first, rows, alpha, limit, ROWS, ACTIVATION, PLAINLY)


@triton.jit(do_not_specialize=["pairs", "experts"])
def sum_kernel(
    results, picked, real, weights, out, pairs, experts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PICKS: tl.constexpr, PADDED: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """A result times its weight is rounded to the wider dtype of both. Rows of padding become 0."""
    row, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = real_pairs(real, pairs, PICKS, PADDED)
    total = tl.zeros([BLOCK], tl.float32)
    for pick in tl.static_range(PICKS):
        pair = row * PICKS + pick
        there = (pair < last) & (load_picks(picked, pair, pairs, experts) >= 0)
        y = tl.load(results + pair.to(tl.int64) * WIDTH + at, mask=there & (at < WIDTH), other=0.0)
        part = y.to(tl.float32) * tl.load(weights + pair).to(tl.float32)
        if weights.dtype.element_ty == results.dtype.element_ty:
            part = rounded(part, results.dtype.element_ty, PLAINLY).to(tl.float32)
        total += tl.where(there, part, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + at, rounded(total, out.dtype.element_ty, PLAINLY), mask=at < WIDTH)
