"""Attention of rows with many tokens. It is bound by the matrix units, so tiles are large and few of them are masked.

A program takes a block of packed query rows (tile.py) of one KV head, and walks over the keys that any of them sees.
Only tiles on the causal diagonal and on the edge of a window or chunk are masked. Both history and this step's tokens
are read from pages. The kernel that calls these functions is in mixed.py.

A short chunk with a long history has too few blocks to fill the device: 64 tokens of a model with 40 heads are 40
programs, and each would walk over the whole history. So their keys are divided among `splits` programs, as in
decode.py, and the results are combined:

    partial  float32 [tokens, heads, splits, value width]
    stats    float32 [tokens, heads, splits, 2]          peak and total; the total is 0 if a split found no keys
"""

from __future__ import annotations

import triton
import triton.language as tl

from djinnd.model.kernels.attention.tile import LOG2_E, UNSEEN, Tiles, attend_tiles, first_seen, load_rows


def prefill_tiles(packed_rows: int, dim: int, itemsize: int, hopper: bool) -> Tiles:
    """Tile sizes. On Hopper a warpgroup of 4 warps takes 64 rows; other GPUs have half the shared memory or less. Two
    warpgroups share the tiles that they load, which pays if there are enough programs to fill the device. Products of
    float32 are unrolled into single multiplications: larger tiles take minutes to compile, and spill registers.
    Widths of 512 (Gemma 4) leave room for small tiles only."""
    if itemsize == 4:
        return Tiles(32, 32, warps=4, stages=2) if dim <= 128 else Tiles(16, 16, warps=4, stages=2)
    if dim > 256:
        return Tiles(32, 16, warps=4, stages=2)
    if dim * itemsize > 256:
        return Tiles(64, 32, warps=4, stages=2)
    if not hopper:
        return Tiles(64, 64, warps=4, stages=2)
    return Tiles(64, 64, warps=4, stages=3) if packed_rows <= 512 else Tiles(128, 64, warps=8, stages=3)


MOST_SPLITS = 8
SHORTEST_SPLIT = 256  # tokens


def prefill_splits(tokens: int, group: int, kv_heads: int, max_kv: int, tiles: Tiles, processors: int) -> int:
    """Number of pieces into which the keys of each block of query rows are divided.

    All blocks of a chunk of `tokens` together give each processor about one program, and no more, because the results
    of the pieces have to be written and read. This also bounds their memory, to some 4 MB on an H200.
    """
    programs = kv_heads * triton.cdiv(tokens * group, tiles.rows)
    return int(chunk_splits.fn(programs, processors, min(max_kv // SHORTEST_SPLIT, MOST_SPLITS)))


@triton.jit
def chunk_splits(programs, processors, most):
    return max(min(processors // max(programs, 1), most), 1)


@triton.jit
def attend_block(
    row, start, queries, length, kv_head, block, split,
    query, keys, values, out, partial, stats, page_table, sinks,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    score_scale, cap, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes one split of one block of the row's queries, for one KV head. DIRECT: there is only one split, so the
    program normalises and writes the output itself."""
    if block * ROWS < queries * GROUP:
        packed = block * ROWS + tl.arange(0, ROWS)
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        mine = token < queries
        piece = ((start + token).to(tl.int64) * HEADS + head) * splits + split

        key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
        query_rows = query + (start + token).to(tl.int64) * query_token + head * query_head
        q = load_rows(query_rows[:, None] + key_dims[None, :], mine, key_dims < KEY, True, KEY != KEY_DIM)

        history = length - queries
        position = history + token
        oldest = history + block * ROWS // GROUP  # positions of the block's first and last query
        newest = tl.minimum(history + (block * ROWS + ROWS - 1) // GROUP, length - 1)
        whole_end = (oldest + 1) // TILE * TILE  # keys [whole_begin, whole_end) are seen by all of them
        begin = 0
        whole_begin = 0
        if WINDOW:
            begin = tl.minimum(first_seen(oldest, window, WINDOW) // TILE * TILE, whole_end)
            whole_begin = tl.minimum(tl.cdiv(first_seen(newest, window, WINDOW), TILE) * TILE, whole_end)
        last = newest + 1
        if not DIRECT:
            span = tl.cdiv(tl.cdiv(last - begin, splits), TILE) * TILE
            begin += split * span
            last = tl.minimum(begin + span, last)
            whole_begin = tl.minimum(tl.maximum(whole_begin, begin), tl.maximum(last, begin))
            whole_end = tl.minimum(tl.maximum(whole_end, whole_begin), tl.maximum(last, begin))

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if DIRECT and SINKS:
            peak = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([ROWS, VALUE_DIM], tl.float32)
        keys += kv_head * key_head
        values += kv_head * value_head
        table = page_table + row.to(tl.int64) * table_row
        if WINDOW:
            acc, peak, total = attend_tiles(
                acc, peak, total, q, begin, whole_begin, position, length, window,
                keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
                PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, TILE, True, WINDOW, CAP, UPCAST,
            )  # fmt: skip
        acc, peak, total = attend_tiles(
            acc, peak, total, q, whole_begin, whole_end, position, length, window,
            keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
            PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, TILE, False, WINDOW, CAP, UPCAST,
        )  # fmt: skip
        acc, peak, total = attend_tiles(
            acc, peak, total, q, whole_end, last, position, length, window,
            keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
            PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, TILE, True, WINDOW, CAP, UPCAST,
        )  # fmt: skip
        stored = mine[:, None] & (value_dims < VALUE)[None, :]
        if DIRECT:
            at = ((start + token).to(tl.int64) * HEADS + head) * VALUE
            tl.store(
                out + at[:, None] + value_dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored
            )
        else:
            tl.store(partial + piece[:, None] * VALUE + value_dims[None, :], acc, mask=stored)
            tl.store(stats + piece * 2, peak, mask=mine)
            tl.store(stats + piece * 2 + 1, total, mask=mine)


@triton.jit
def combine_blocks(
    head, token, partial, stats, out, sinks, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one head of one token."""
    split, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_DIM)
    at = (token.to(tl.int64) * HEADS + head) * splits + split
    totals = tl.load(stats + at * 2 + 1, mask=split < splits, other=0.0)
    used = totals > 0
    peaks = tl.load(stats + at * 2, mask=used, other=UNSEEN)
    there = used[:, None] & (dims < VALUE)[None, :]
    part = tl.load(partial + at[:, None] * VALUE + dims[None, :], mask=there, other=0.0)
    peak = tl.max(peaks, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    weight = tl.where(used, tl.exp2(peaks - peak), 0.0)
    total = tl.sum(totals * weight, 0)
    if SINKS:
        total += tl.exp2(sink - peak)
    acc = tl.sum(part * weight[:, None], 0)
    at = (token.to(tl.int64) * HEADS + head) * VALUE
    tl.store(out + at + dims, (acc / total).to(out.dtype.element_ty), mask=dims < VALUE)
