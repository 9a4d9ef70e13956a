"""Decodes coded matrices to plain weights, at memory bandwidth. Batches of many tokens need that.

With `picked`, a program of a matrix that is not picked returns at once. The grid is fixed, so a captured graph may hold
the launch, and the parts may lie in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.coded.facts import Facts, arguments, facts_of
from djinnd.model.kernels.coded.numbers import rounded
from djinnd.model.kernels.coded.tiles import load_weights
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.weights.forms.coding import Coding

PROGRAMS = 512  # most programs of a matrix, if only picked matrices are decoded
ROWS, BYTES = 8, 512  # a tile
SQUARE = 64  # rows and bytes of a tile that is written column by column
WARPS = 4


@triton.jit
def decode_coded_kernel(
    picked, codes, scales, third, fourth, out, rows, step, tiles, row_stride, col_stride, matrix_stride,
    KIND: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, NATIVE: tl.constexpr, PICKED: tl.constexpr,
    ROWS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """Decodes one matrix, tile by tile."""
    matrix = tl.program_id(1).to(tl.int64)
    if PICKED:  # noqa: SIM102 - Triton would load in both cases
        if tl.load(picked + matrix) == 0:
            return
    codes += matrix * rows * STRIDE
    scales += matrix * tl.cdiv(rows, step) * GROUPS
    if ZEROS:
        third += matrix * rows * GROUPS
    elif not ORDER:
        third += matrix
    if ORDER:
        fourth += matrix * (ROW * 2 if SPAN else ROW)
    out += matrix * matrix_stride
    across: tl.constexpr = (ROW + RUNS * RUN - 1) // (RUNS * RUN)
    inside = tl.arange(0, RUN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        start = tile % across * RUNS * RUN
        run = start + tl.arange(0, RUNS) * RUN
        low, high = load_weights(
            codes, scales, third, fourth, tl.minimum(row, rows - 1), start, step,
            KIND, ROW, STRIDE, GROUP, GROUPS, ZEROS, ORDER, NATIVE, PLAINLY, RUNS, RUN, ROW % (RUNS * RUN) != 0,
        )  # fmt: skip
        low, high = rounded(low, out.dtype.element_ty, PLAINLY), rounded(high, out.dtype.element_ty, PLAINLY)
        line = out + row.to(tl.int64)[:, None, None] * row_stride
        within = (row < rows)[:, None, None]
        byte = (run[:, None] + inside[None, :])[None, :, :]
        if SPAN == 1:
            column = (run[:, None] * 2 + tl.arange(0, 2 * RUN)[None, :])[None, :, :]
            weights = tl.reshape(tl.join(low, high), (ROWS, RUNS, 2 * RUN))
            tl.store(line + column.to(tl.int64) * col_stride, weights, mask=within & (column < ROW * 2))
        elif SPAN:
            column = byte // SPAN * (2 * SPAN) + byte % SPAN
            tl.store(line + column.to(tl.int64) * col_stride, low, mask=within & (byte < ROW))
            tl.store(line + (column + SPAN).to(tl.int64) * col_stride, high, mask=within & (byte < ROW))
        else:
            tl.store(line + byte.to(tl.int64) * col_stride, low, mask=within & (byte < ROW))


def decode_on_device(coding: Coding, parts: Sequence[Tensor], out: Tensor, picked: Tensor | None = None) -> None:
    """Like `coding.decode`, and equal to it bit for bit.

    parts: contiguous, of a stack of matrices, [stack, *shape] each. out: [stack, rows, cols], maybe a transposed view.
    picked: int32 [stack], not 0 for the matrices to decode; without it, all are decoded. `coding` must have a kernel:
    see `decodes`.
    """
    stack, rows, cols = out.shape
    facts = facts_of(coding, rows, cols)
    described = coding.parts(rows, cols)
    assert facts is not None and all(part.is_contiguous() for part in parts)
    assert [tuple(part.shape) for part in parts] == [(stack, *each.shape) for each in described]
    assert picked is None or (len(picked) == stack and picked.dtype == torch.int32)
    tile_rows, runs, run = _tile(facts, out)
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(facts.row_bytes, run * runs)
    programs = tiles if picked is None else min(tiles, PROGRAMS)
    matrix_stride, row_stride, col_stride = out.stride()
    given = arguments(facts, list(parts))
    decode_coded_kernel[(programs, stack)](
        given[0] if picked is None else picked, *given, out, rows, facts.step, tiles,
        row_stride, col_stride, matrix_stride, **facts.options(out.device), PICKED=picked is not None,
        ROWS=tile_rows, RUNS=runs, RUN=run, PLAINLY=INTERPRETED, num_warps=WARPS,
        enable_fp_fusion=False,  # a multiply-add would round once where the reference rounds twice
    )  # fmt: skip


def decodes(coding: Coding, rows: int, cols: int) -> bool:
    """Returns True if `decode_on_device` can decode matrices of this shape."""
    return facts_of(coding, rows, cols) is not None


def _tile(facts: Facts, out: Tensor) -> tuple[int, int, int]:
    """→ rows, runs, and bytes of a run. A thread loads the bytes of a run, and stores 16 bytes of weights."""
    rows, widest = triton.next_power_of_2(out.shape[1]), triton.next_power_of_2(facts.row_bytes)
    if out.stride(1) < out.stride(2):
        run = min(facts.run, SQUARE, widest)
        return min(SQUARE, rows), min(SQUARE, widest) // run, run
    run = min(facts.run, 16 // out.element_size() // (2 if facts.span == 1 else 1), widest)
    return min(ROWS, rows), min(BYTES, widest) // run, run
