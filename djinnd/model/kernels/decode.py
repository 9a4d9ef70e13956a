"""Attention of rows that bring one or a few tokens: bound by reading the KV, so the reading is spread over the device.

Split KV (FlashDecoding: Dao, Haziza, Massa, Sizov, 2023): a row's keys are divided among `splits` programs, each of
which leaves an unnormalised output with its peak and total; a second kernel combines them. The grid depends on host
bounds only. Lengths and page tables are read on the device, and a split that finds no keys leaves at once, so that a
captured graph serves any lengths.

    partial  float32 [rows x max_query, heads, splits, head_dim]
    stats    float32 [rows x max_query, heads, splits, 2]          peak and total
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.scratch import Scratch
from djinnd.model.kernels.tile import (
    INTERPRETED,
    LOG2_E,
    PagedRows,
    Tiles,
    attend_tiles,
    load_rows,
    pool_strides,
    score_factors,
)

MAX_QUERY = 8  # longer rows are worth the prefill kernel's larger tiles
MOST_PACKED_ROWS = 64  # queries of a group's heads that one program takes: of more, registers spill
MOST_WAVES = tl.constexpr(8)  # programs a processor
AT_ONCE, NEARLY_ALL = 3, 0.8  # programs a processor that run at once, and the share of these that is worth it
SHORTEST_SPLIT, LONGEST_SPLIT = 64, 4096  # tokens; a long session among many short ones must not run alone at the end
MAX_SPLITS, FEW_SPLITS = 128, 8
COMBINED_AT_ONCE = 16


def fits_decode(max_query: int, group: int) -> bool:
    """Whether rows of up to so many tokens, each with `group` heads for one KV head, are for this kernel."""
    return max_query == 1 or (max_query <= MAX_QUERY and max_query * group <= MOST_PACKED_ROWS)


def split_count(rows: int, kv_heads: int, max_kv: int, processors: int) -> int:
    """Into how many pieces to divide each row's keys. A row alone fills the device once, which measured best; rows are
    of unequal length, so many of them want several waves to keep it filled to the end. Where all programs run at once,
    a few too many are worse than a few too few: some processors have one more than others, which all wait for."""
    useful, needed = split_bounds(max_kv)
    programs, of_each = processors * min(rows, MOST_WAVES.value), rows * kv_heads
    if rows <= AT_ONCE and programs // of_each * of_each >= NEARLY_ALL * programs:
        useful = min(useful, programs // of_each)
    return int(splits_to_fill.fn(rows, kv_heads, programs, useful, needed))


def split_bounds(max_kv: int) -> tuple[int, int]:
    """→ the most splits that are of use, and the fewest that a long session may have."""
    useful = min(-(-max_kv // SHORTEST_SPLIT), MAX_SPLITS)
    needed = min(-(-max_kv // LONGEST_SPLIT), FEW_SPLITS)
    return useful, max(needed, 1)


@triton.jit
def splits_to_fill(rows, kv_heads, programs, useful, needed):
    filling = (programs + rows * kv_heads - 1) // (rows * kv_heads)
    return max(min(filling, useful), needed)


def decode_tiles(packed_rows: int, dim: int, itemsize: int) -> Tiles:
    keys = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16  # see prefill_tiles
    return Tiles(max(16, triton.next_power_of_2(packed_rows)), keys, warps=4, stages=3 if keys == 64 else 2)


@triton.jit
def split_span(first, length, splits, TILE: tl.constexpr):
    """Keys of one split: an equal share of [first, length), in whole tiles."""
    return tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE


@triton.jit
def first_key(length, queries, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that any query of the row sees, down to a whole tile."""
    if WINDOW:
        return tl.maximum(length - queries - window + 1, 0) // TILE * TILE
    else:
        return 0


@triton.jit(do_not_specialize=["table_row", "window", "max_query", "splits"])
def decode_kernel(
    query, keys, values, out, partial, stats, query_starts, kv_lengths, page_table, sinks,
    query_token, query_head, pool_page, pool_token, pool_head, table_row,
    score_scale, cap, window, max_query, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    attend_split(
        tl.program_id(0), tl.program_id(1), row, start, queries, tl.load(kv_lengths + row), row * max_query,
        query, keys, values, out, partial, stats, page_table, sinks,
        query_token, query_head, pool_page, pool_token, pool_head, table_row,
        score_scale, cap, window, splits,
        HEADS, GROUP, PAGE, HEAD_DIM, DIM, ROWS, TILE, DIRECT, WINDOW, CAP, SINKS, UPCAST,
    )  # fmt: skip


@triton.jit
def attend_split(
    split, kv_head, row, start, queries, length, first_piece,
    query, keys, values, out, partial, stats, page_table, sinks,
    query_token, query_head, pool_page, pool_token, pool_head, table_row,
    score_scale, cap, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head. The row's `queries` tokens begin with `start`; of all tokens' pieces its own
    begin with `first_piece`. DIRECT: there is one split, so it normalises and writes the output itself."""
    begin = first_key(length, queries, window, TILE, WINDOW)
    span = split_span(begin, length, splits, TILE)
    first = begin + split * span
    last = tl.minimum(first + span, length)
    if first < last:
        packed = tl.arange(0, ROWS)
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        mine = token < queries
        dims = tl.arange(0, DIM)
        query_rows = query + (start + token).to(tl.int64) * query_token + head * query_head
        q = load_rows(query_rows[:, None] + dims[None, :], mine, dims < HEAD_DIM, True, HEAD_DIM != DIM)

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if DIRECT and SINKS:
            peak = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([ROWS, DIM], tl.float32)
        position = length - queries + token
        keys += kv_head * pool_head
        values += kv_head * pool_head
        table = page_table + row.to(tl.int64) * table_row
        whole = first  # keys [first, whole) are seen by all queries
        if not WINDOW:
            whole = tl.maximum(tl.minimum(last, length - queries + 1) // TILE * TILE, first)
            acc, peak, total = attend_tiles(
                acc, peak, total, q, first, whole, position, length, window,
                keys, values, table, pool_page, pool_token, score_scale, cap,
                PAGE, HEAD_DIM, DIM, TILE, False, WINDOW, CAP, UPCAST,
            )  # fmt: skip
        acc, peak, total = attend_tiles(
            acc, peak, total, q, whole, last, position, length, window,
            keys, values, table, pool_page, pool_token, score_scale, cap,
            PAGE, HEAD_DIM, DIM, TILE, True, WINDOW, CAP, UPCAST,
        )  # fmt: skip

        stored = mine[:, None] & (dims < HEAD_DIM)[None, :]
        if DIRECT:
            at = ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM
            tl.store(out + at[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)
        else:
            at = ((first_piece.to(tl.int64) + token) * HEADS + head) * splits + split
            tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)
            tl.store(stats + at * 2, peak, mask=mine)
            tl.store(stats + at * 2 + 1, total, mask=mine)


@triton.jit(do_not_specialize=["window", "max_query", "splits"])
def combine_kernel(
    partial, stats, out, query_starts, kv_lengths, sinks, window, max_query, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, token = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    if token < queries:
        combine_splits(
            tl.program_id(0), start + token, queries, tl.load(kv_lengths + row), row * max_query + token,
            partial, stats, out, sinks, window, splits,
            HEADS, HEAD_DIM, DIM, TILE, SPLITS, WINDOW, SINKS,
        )  # fmt: skip


@triton.jit
def combine_splits(
    head, token, queries, length, piece, partial, stats, out, sinks, window, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One head of one token: the outputs of the splits that had keys, SPLITS of them at a time."""
    begin = first_key(length, queries, window, TILE, WINDOW)
    used = tl.cdiv(length - begin, split_span(begin, length, splits, TILE))
    dims = tl.arange(0, DIM)
    peak = float("-inf")
    total = 0.0
    if SINKS:
        peak = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([DIM], tl.float32)
    base = (piece.to(tl.int64) * HEADS + head) * splits
    for first in range(0, used, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = split < used
        at = base + split
        peaks = tl.load(stats + at * 2, mask=there, other=float("-inf"))
        totals = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        stored = there[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :], mask=stored, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weight = tl.exp2(peaks - higher)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(totals * weight, 0)
        peak = higher
    at = (token.to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(out + at + dims, (acc / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedRows,
    out: Tensor,
    scratch: Scratch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Writes `out` [tokens, heads, head_dim] for the rows of `batch`.

    `splits` and `tiles` are chosen from the shapes unless a measurement gives them.
    """
    assert q.stride(2) == 1
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    rows, group, dim = batch.kv_lengths.numel(), heads // kv_heads, triton.next_power_of_2(head_dim)
    max_query = batch.max_query
    if splits is None:
        splits = split_count(rows, kv_heads, batch.max_kv, scratch.processors)
    tiles = tiles or decode_tiles(max_query * group, dim, q.element_size())
    assert tiles.keys % page_size == 0 or page_size % tiles.keys == 0
    pieces = rows * max_query * heads * splits
    partial, stats = scratch.take(pieces * head_dim, pieces * 2) if splits > 1 else (out, out)
    shape = {"HEADS": heads, "HEAD_DIM": head_dim, "DIM": dim, "TILE": tiles.keys}
    options = {"WINDOW": window > 0, "SINKS": sinks is not None}
    sinks = q if sinks is None else sinks
    decode_kernel[(splits, kv_heads, rows)](
        q, keys, values, out, partial, stats, batch.query_starts, batch.kv_lengths, batch.page_table, sinks,
        q.stride(0), q.stride(1), *pool_strides(keys, values), batch.page_table.stride(0),
        *score_factors(scale, softcap), window, max_query, splits,
        GROUP=group, PAGE=page_size, ROWS=tiles.rows, DIRECT=splits == 1, CAP=softcap > 0, UPCAST=INTERPRETED,
        num_warps=tiles.warps, num_stages=tiles.stages, **shape, **options,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, rows, max_query)](
            partial, stats, out, batch.query_starts, batch.kv_lengths, sinks, window, max_query, splits,
            SPLITS=COMBINED_AT_ONCE, num_warps=2, **shape, **options,
        )  # fmt: skip
