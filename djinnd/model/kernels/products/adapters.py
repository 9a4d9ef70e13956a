"""Products of LoRA adapters for all rows of a step: y += B (A x), each token with the matrices of its own adapter.

    shrink   (tile, split of the inputs)    low[split, place in order, parts · rank] = x Aᵀ
    expand   (tile, tile of the outputs)    y[token, outputs] += Σ low[split] Bᵀ

A program works on one tile of tokens with one adapter (adapter_rows.py), and finds the adapter's matrices by their
addresses in a table. So the launches depend on bounds only, and a captured graph serves any adapters. A tile without a
slot ends at once. Splits are added in a fixed order: the result does not depend on which program is done first.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.adapter_rows import TILE_FIELDS, AdapterRows
from djinnd.model.kernels.launching.interpreter import INTERPRETED, dot
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.tuning import MAX_RANK, TILE_TOKENS

FIELDS = 3  # of a target's slot in the table: address of A, address of B, rank; 0, 0, 0 if the adapter has none
MOST_PARTS = 3  # of a target: q, k and v

COLUMNS, RANKS, OUTPUTS = 128, 32, 64  # chosen: inputs, rows of A, and outputs that a program takes at a time
_LEAST_INPUTS = 512  # chosen: inputs of a split


@triton.jit(do_not_specialize=["parts", "splits", "places", "stride"])
def shrink_kernel(
    x, order, tiles, table, low, inputs, parts, splits, places, stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3)
    if slot >= 0:
        a = tl.multiple_of(tl.load(table + slot * 3).to(tl.pointer_type(x.dtype.element_ty)), 16)
        rows = tl.load(table + slot * 3 + 2).to(tl.int32) * parts
        first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        place = tl.arange(0, TOKENS)
        there = (place < count)[:, None]
        token = tl.load(order + first + place, mask=place < count, other=0)
        vectors = x + token.to(tl.int64)[:, None] * inputs
        sums = low + (split * places + first + place).to(tl.int64)[:, None] * stride
        each = tl.cdiv(tl.cdiv(inputs, COLUMNS), splits) * COLUMNS
        end = tl.minimum((split + 1) * each, inputs)
        for start in range(0, rows, RANKS):
            row = start + tl.arange(0, RANKS)
            acc = tl.zeros([TOKENS, RANKS], tl.float32)
            for begin in range(split * each, end, COLUMNS):
                at = begin + tl.arange(0, COLUMNS)
                v = tl.load(vectors + at[None, :], mask=there & (at < end)[None, :], other=0.0)
                w = tl.load(
                    a + row.to(tl.int64)[None, :] * inputs + at[:, None],
                    mask=(row < rows)[None, :] & (at < end)[:, None],
                    other=0.0,
                )
                acc = dot(v, w, acc, PLAINLY)
            tl.store(sums + row[None, :], acc, mask=there & (row < rows)[None, :])


@triton.jit(do_not_specialize=["splits", "places", "stride", "first_size", "second_size", "outputs"])
def expand_kernel(
    low, order, tiles, table, y, splits, places, stride, first_size, second_size, outputs,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * 3)
    if slot >= 0:
        rank = tl.load(table + slot * 3 + 2).to(tl.int32)
        if rank > 0:
            b = tl.load(table + slot * 3 + 1).to(tl.pointer_type(y.dtype.element_ty))
            # No tile of outputs reaches from one part into another, as these have different columns of `low`.
            number = tl.program_id(1)
            firsts, seconds = tl.cdiv(first_size, OUTPUTS), tl.cdiv(second_size, OUTPUTS)
            part = (number >= firsts).to(tl.int32) + (number >= firsts + seconds).to(tl.int32)
            if part == 0:
                begin, end = number * OUTPUTS, first_size
            elif part == 1:
                begin, end = first_size + (number - firsts) * OUTPUTS, first_size + second_size
            else:
                begin, end = first_size + second_size + (number - firsts - seconds) * OUTPUTS, outputs
            first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
            place = tl.arange(0, TOKENS)
            token = tl.load(order + first + place, mask=place < count, other=0).to(tl.int64)
            output = begin + tl.arange(0, OUTPUTS)
            acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
            for start in range(0, rank, RANKS):
                row = start + tl.arange(0, RANKS)
                through = tl.zeros([TOKENS, RANKS], tl.float32)
                there = (place < count)[:, None] & (row < rank)[None, :]
                for split in range(0, splits):
                    at = (split * places + first + place).to(tl.int64)[:, None] * stride + part * rank
                    through += tl.load(low + at + row[None, :], mask=there, other=0.0)
                w = tl.load(
                    b + output.to(tl.int64)[None, :] * rank + row[:, None],
                    mask=(output < end)[None, :] & (row < rank)[:, None],
                    other=0.0,
                )
                acc = dot(through.to(w.dtype), w, acc, PLAINLY)
            results = y + token[:, None] * outputs + output[None, :]
            written = (place < count)[:, None] & (output < end)[None, :]
            before = tl.load(results, mask=written, other=0.0).to(tl.float32)
            tl.store(results, (before + acc).to(y.dtype.element_ty), mask=written)


def add_products(
    x: Tensor, y: Tensor, rows: AdapterRows, table: Tensor, sizes: Sequence[int], scratch: Scratch
) -> None:
    """Adds the adapters' products for x [tokens, in] to y [tokens, out]; both contiguous, of the adapters' dtype.

    table: int64 [slots, FIELDS] of the target. sizes: outputs of its parts. Tiles have at most TILE_TOKENS tokens.
    """
    tokens, inputs = x.shape
    assert x.is_contiguous() and y.is_contiguous() and x.dtype == y.dtype and len(sizes) <= MOST_PARTS
    tiles, stride = len(rows.tiles), len(sizes) * MAX_RANK
    splits = max(1, min(scratch.processors // tiles, inputs // _LEAST_INPUTS))
    (low,) = scratch.take(splits * tokens * stride)
    assert rows.tiles.shape[1] == TILE_FIELDS == FIELDS == table.shape[1]
    shrink_kernel[(tiles, splits)](
        x, rows.order, rows.tiles, table, low, inputs, len(sizes), splits, tokens, stride,
        TOKENS=TILE_TOKENS, COLUMNS=COLUMNS, RANKS=RANKS, PLAINLY=INTERPRETED, num_warps=4,
    )  # fmt: skip
    first, second, _ = (*sizes, 0, 0)[:MOST_PARTS]
    expand_kernel[(tiles, sum(triton.cdiv(size, OUTPUTS) for size in sizes))](
        low, rows.order, rows.tiles, table, y, splits, tokens, stride, first, second, y.shape[1],
        TOKENS=TILE_TOKENS, RANKS=RANKS, OUTPUTS=OUTPUTS, PLAINLY=INTERPRETED, num_warps=4,
    )  # fmt: skip
