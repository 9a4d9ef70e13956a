"""Y = X Wᵀ for a few tokens. It is still bound by reading W once, but needs tensor cores, because the ordinary cores
would be too slow.

A program computes some rows of W times all of X, which comes from the caches. A token's sums do not depend on the other
tokens: they are equal to the bit for any 1 to 8 tokens, and for any 9 to 16. On an H200 the products of a block of
Llama-2-13B take 5 to 8 % longer than one token's by `matvec`; cuBLAS takes 11 to 15 % longer (docs/log).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.launching.gpu import processors, shared_memory
from djinnd.model.kernels.launching.interpreter import INTERPRETED, dot
from djinnd.model.tuning import FEW_ROWS

_LEAST_TOKENS = 8  # tokens of the smallest tile for tensor cores


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Rows and columns of W in a tile, and Triton's launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["tokens"])
def few_rows_kernel(
    x, weight, bias, out, tokens, rows,
    IN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    # Rows past the end read the last row again: no read is outside of W, and loads need no mask for rows.
    weight += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * IN
    there = (token < tokens)[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in tl.range(0, IN, COLUMNS, num_stages=STAGES):
        at = first + column
        if IN % COLUMNS:
            w = tl.load(weight + at[None, :], mask=(at < IN)[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(x + token[None, :] * IN + at[:, None], mask=there & (at < IN)[:, None], other=0.0)
        else:
            w = tl.load(weight + at[None, :], eviction_policy="evict_first")
            v = tl.load(x + token[None, :] * IN + at[:, None], mask=there, other=0.0)
        acc = dot(w, v, acc, PLAINLY)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    out += token[None, :] * rows + row[:, None]
    tl.store(out, acc.to(out.dtype.element_ty), mask=there & (row < rows)[:, None])


def row_tiles(rows: int, tokens: int, processors: int, shared: int) -> RowTiles:
    """Tiles chosen by a sweep on an H200. With few programs, each program keeps more loads in flight.

    tokens: of the tile. shared: bytes of shared memory that a program may have for loads in flight.
    """
    is_tall = rows >= 64 * processors
    if tokens > _LEAST_TOKENS:
        tiles = RowTiles(rows=64, columns=128 if is_tall else 256, warps=4, stages=4)
    elif is_tall:
        tiles = RowTiles(rows=32, columns=256, warps=2, stages=3)
    else:
        tiles = RowTiles(rows=32 if rows >= 32 * processors else 16, columns=512, warps=2, stages=3)
    fitting = shared // (2 * tiles.columns * (tiles.rows + tokens))
    return replace(tiles, stages=max(1, min(tiles.stages, fitting)))


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: RowTiles | None = None) -> Tensor:
    """x [..., in] of at most FEW_ROWS rows in all, weight [out, in] and bias [out] of one 16-bit dtype → [..., out].
    Sums in float32. `tiles` is derived from the shapes; benchmarks set it."""
    rows, width = weight.shape
    tokens = x.numel() // width
    assert 0 < tokens <= FEW_ROWS and x.shape[-1] == width and weight.is_contiguous()
    padded = _LEAST_TOKENS if tokens <= _LEAST_TOKENS else FEW_ROWS
    tiles = tiles or row_tiles(rows, padded, processors(x.device), shared_memory(x.device))
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    few_rows_kernel[(triton.cdiv(rows, tiles.rows),)](
        x.contiguous(), weight, weight if bias is None else bias, out, tokens, rows,
        IN=width, TOKENS=padded, ROWS=tiles.rows, COLUMNS=tiles.columns,
        STAGES=tiles.stages, BIAS=bias is not None, PLAINLY=INTERPRETED, num_warps=tiles.warps,
    )  # fmt: skip
    return out
