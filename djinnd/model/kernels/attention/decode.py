"""Attention of rows with one or a few tokens. It is bound by reading the KV, so the reading is spread over the device.

Split KV (FlashDecoding: Dao, Haziza, Massa, Sizov, 2023): a row's keys are divided among `splits` programs. Each writes
an unnormalised output with its peak and total, and a second kernel combines them. The grid depends only on host bounds.
Lengths and page tables are read on the device, and a split without keys returns at once, so a captured graph serves any
lengths.

    partial  float32 [rows x max_query, heads, splits, value width]
    stats    float32 [rows x max_query, heads, splits, 2]          peak and total
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.attention.fp8 import readable
from djinnd.model.kernels.attention.tile import (
    LOG2_E,
    Tiles,
    attend_tiles,
    first_seen,
    load_rows,
    padded_width,
    pool_strides,
    reach,
    score_factors,
    width_options,
)
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax

MAX_QUERY = 8  # tokens of a row; longer rows are faster with the prefill kernel's larger tiles
MOST_PACKED_ROWS = 64  # packed query rows of a program; more spill registers
MOST_WAVES = tl.constexpr(8)  # programs a processor
AT_ONCE, NEARLY_ALL = 3, 0.8  # programs that a processor runs at once, and the share of them that is enough
SHORTEST_SPLIT, LONGEST_SPLIT = 64, 4096  # tokens; a long session among many short ones must not run alone at the end
MAX_SPLITS, FEW_SPLITS = 128, 8  # most splits of a row, and most splits that LONGEST_SPLIT may enforce
COMBINED_AT_ONCE = 16  # splits that the combining kernel loads at once


def fits_decode(rows: int, max_query: int, group: int) -> bool:
    """Returns True if this kernel serves the rows, of up to `max_query` tokens with `group` query heads a KV head. More
    rows of one token are divided better by singles_kernel (mixed.py), which knows their lengths."""
    return rows <= AT_ONCE if max_query == 1 else max_query <= MAX_QUERY and max_query * group <= MOST_PACKED_ROWS


def split_count(rows: int, kv_heads: int, max_kv: int, processors: int) -> int:
    """Number of pieces into which each row's keys are divided.

    A single row fills the device once, which measured best. Rows differ in length, so several rows get several waves,
    to keep the device filled to the end. If all programs run at once, slightly too many are worse than slightly too
    few: some processors then run one program more, and the step waits for them.
    """
    useful, needed = split_bounds(max_kv)
    programs, of_each = processors * min(rows, MOST_WAVES.value), rows * kv_heads
    if rows <= AT_ONCE and programs // of_each * of_each >= NEARLY_ALL * programs:
        useful = min(useful, programs // of_each)
    return int(splits_to_fill.fn(rows, kv_heads, programs, useful, needed))


def split_bounds(max_kv: int) -> tuple[int, int]:
    """→ the most useful number of splits for up to `max_kv` tokens, and the smallest allowed number."""
    useful = min(-(-max_kv // SHORTEST_SPLIT), MAX_SPLITS)
    needed = min(-(-max_kv // LONGEST_SPLIT), FEW_SPLITS)
    return useful, max(needed, 1)


@triton.jit
def splits_to_fill(rows, kv_heads, programs, useful, needed):
    """→ splits a row so that all rows together have about `programs` programs, from `needed` to `useful`."""
    filling = (programs + rows * kv_heads - 1) // (rows * kv_heads)
    return max(min(filling, useful), needed)


def decode_tiles(packed_rows: int, dim: int, itemsize: int) -> Tiles:
    keys = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16  # see prefill_tiles
    return Tiles(max(16, triton.next_power_of_2(packed_rows)), keys, warps=4, stages=3 if keys == 64 else 2)


@triton.jit
def split_span(first, length, splits, TILE: tl.constexpr):
    """Number of keys of one split: an equal share of [first, length), in whole tiles."""
    return tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE


@triton.jit
def first_key(length, queries, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that any query of the row sees, rounded down to a whole tile."""
    if WINDOW:
        return first_seen(length - queries, window, WINDOW) // TILE * TILE
    else:
        return 0


@triton.jit(do_not_specialize=["table_row", "window", "max_query", "splits"])
def decode_kernel(
    query, keys, values, out, partial, stats, query_starts, kv_lengths, page_table, sinks,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    score_scale, cap, window, max_query, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    attend_split(
        tl.program_id(0), tl.program_id(1), row, start, queries, tl.load(kv_lengths + row), row * max_query,
        query, keys, values, out, partial, stats, page_table, sinks,
        query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
        score_scale, cap, window, splits,
        HEADS, GROUP, PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, ROWS, TILE, DIRECT, WINDOW, CAP, SINKS, UPCAST,
    )  # fmt: skip


@triton.jit
def attend_split(
    split, kv_head, row, start, queries, length, first_piece,
    query, keys, values, out, partial, stats, page_table, sinks,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    score_scale, cap, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes one split of one row and KV head.

    start, queries: the row's first token in the batch, and its number of tokens.
    first_piece: index of the row's first token in `partial` and `stats`.
    DIRECT: `splits` is 1. A program of the only split normalises and writes the output itself.
    """
    begin = first_key(length, queries, window, TILE, WINDOW)
    span = split_span(begin, length, splits, TILE)
    first = begin + split * span
    last = tl.minimum(first + span, length)
    if first < last:
        packed = tl.arange(0, ROWS)
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        mine = token < queries
        key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
        query_rows = query + (start + token).to(tl.int64) * query_token + head * query_head
        q = load_rows(query_rows[:, None] + key_dims[None, :], mine, key_dims < KEY, True, KEY != KEY_DIM)

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        is_alone = DIRECT or splits == 1
        if SINKS and is_alone:
            peak = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([ROWS, VALUE_DIM], tl.float32)
        position = length - queries + token
        keys += kv_head * key_head
        values += kv_head * value_head
        table = page_table + row.to(tl.int64) * table_row
        whole = first  # keys [first, whole) are seen by all queries
        if not WINDOW:
            whole = tl.maximum(tl.minimum(last, length - queries + 1) // TILE * TILE, first)
            acc, peak, total = attend_tiles(
                acc, peak, total, q, first, whole, position, length, window,
                keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
                PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, TILE, False, WINDOW, CAP, UPCAST,
            )  # fmt: skip
        acc, peak, total = attend_tiles(
            acc, peak, total, q, whole, last, position, length, window,
            keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
            PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, TILE, True, WINDOW, CAP, UPCAST,
        )  # fmt: skip

        stored = mine[:, None] & (value_dims < VALUE)[None, :]
        if is_alone:
            at = ((start + token).to(tl.int64) * HEADS + head) * VALUE
            tl.store(
                out + at[:, None] + value_dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored
            )
        else:
            at = ((first_piece.to(tl.int64) + token) * HEADS + head) * splits + split
            tl.store(partial + at[:, None] * VALUE + value_dims[None, :], acc, mask=stored)
            tl.store(stats + at * 2, peak, mask=mine)
            tl.store(stats + at * 2 + 1, total, mask=mine)


@triton.jit(do_not_specialize=["window", "max_query", "splits"])
def combine_kernel(
    partial, stats, out, query_starts, kv_lengths, sinks, window, max_query, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, token = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    if token < queries:
        combine_splits(
            tl.program_id(0), start + token, queries, tl.load(kv_lengths + row), row * max_query + token,
            partial, stats, out, sinks, window, splits,
            HEADS, VALUE, VALUE_DIM, TILE, SPLITS, WINDOW, SINKS,
        )  # fmt: skip


@triton.jit
def combine_splits(
    head, token, queries, length, piece, partial, stats, out, sinks, window, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one head of one token that had keys, SPLITS of them at a time."""
    begin = first_key(length, queries, window, TILE, WINDOW)
    used = tl.cdiv(length - begin, split_span(begin, length, splits, TILE))
    dims = tl.arange(0, VALUE_DIM)
    peak = float("-inf")
    total = 0.0
    if SINKS:
        peak = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([VALUE_DIM], tl.float32)
    base = (piece.to(tl.int64) * HEADS + head) * splits
    for first in range(0, used, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = split < used
        at = base + split
        peaks = tl.load(stats + at * 2, mask=there, other=float("-inf"))
        totals = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        stored = there[:, None] & (dims < VALUE)[None, :]
        part = tl.load(partial + at[:, None] * VALUE + dims[None, :], mask=stored, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weight = tl.exp2(peaks - higher)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(totals * weight, 0)
        peak = higher
    at = (token.to(tl.int64) * HEADS + head) * VALUE
    tl.store(out + at + dims, (acc / total).to(out.dtype.element_ty), mask=dims < VALUE)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    out: Tensor,
    scratch: Scratch,
    softmax: Softmax,
    *,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Writes `out` [tokens, heads, value width] for the rows of `batch`.

    `splits` and `tiles` are derived from the shapes; benchmarks set them.
    """
    assert q.stride(2) == 1
    keys, values = readable(keys), readable(values)
    heads = q.shape[1]
    page_size, kv_heads = keys.shape[1:3]
    rows, group, dim = batch.kv_lengths.numel(), heads // kv_heads, padded_width(keys, values)
    max_query = batch.max_query
    if splits is None:
        splits = split_count(rows, kv_heads, batch.max_kv, scratch.processors)
    tiles = tiles or decode_tiles(max_query * group, dim, q.element_size())
    assert tiles.keys % page_size == 0 or page_size % tiles.keys == 0
    pieces = rows * max_query * heads * splits
    partial, stats = scratch.take(pieces * values.shape[3], pieces * 2) if splits > 1 else (out, out)
    of_keys, of_values = width_options(keys, "KEY"), width_options(values, "VALUE")
    shape = {"HEADS": heads, "TILE": tiles.keys, **of_values}
    window, reaching = reach(softmax)
    options = {"WINDOW": reaching, "SINKS": softmax.sinks is not None}
    sinks = q if softmax.sinks is None else softmax.sinks
    decode_kernel[(splits, kv_heads, rows)](
        q, keys, values, out, partial, stats, batch.query_starts, batch.kv_lengths, batch.page_table, sinks,
        q.stride(0), q.stride(1), *pool_strides(keys, values), batch.page_table.stride(0),
        *score_factors(softmax), window, max_query, splits,
        GROUP=group, PAGE=page_size, ROWS=tiles.rows, DIRECT=splits == 1, CAP=softmax.softcap > 0, UPCAST=INTERPRETED,
        **of_keys, num_warps=tiles.warps, num_stages=tiles.stages, **shape, **options,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, rows, max_query)](
            partial, stats, out, batch.query_starts, batch.kv_lengths, sinks, window, max_query, splits,
            SPLITS=COMBINED_AT_ONCE, num_warps=2, **shape, **options,
        )  # fmt: skip
