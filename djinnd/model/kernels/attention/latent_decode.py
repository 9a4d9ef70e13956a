"""Latent attention of rows with one or a few tokens, over pages of latents that are not expanded.

By absorption (attention/absorption.py) all heads have the same keys: a token's latent and its rotary key. Its value is
the latent again. So a program loads a tile of latents once, for a block of query rows, and uses it as keys and values
(as FlashMLA of DeepSeek does). Query row r of a row of the batch is token r // HEADS and head r % HEADS.

decode.py could not serve: it pads the width of a key, which is 576 for DeepSeek V3, to 1,024, and would load each
latent twice. Splits of the keys are as there, and its second kernel combines them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.attention.decode import COMBINED_AT_ONCE, combine_kernel, first_key, split_count, split_span
from djinnd.model.kernels.attention.fp8 import plain, readable
from djinnd.model.kernels.attention.tile import (
    CHUNKED,
    UNSEEN,
    WINDOWED,
    Tiles,
    block_strides,
    load_rows,
    reach,
    score_factors,
)
from djinnd.model.kernels.launching.gpu import shared_memory
from djinnd.model.kernels.launching.interpreter import INTERPRETED, dot
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.tuning import PARTIAL_BYTES

MAX_QUERY = 8  # chosen: tokens of a row; the keys of longer rows are expanded (attention/latents.py)
LARGE = 150 << 10  # bytes of shared memory, which the largest tiles need on Hopper
LEAST = 16  # given by the hardware: the smallest side of a tile that tensor cores multiply


def latent_tiles(packed_rows: int, width: int, itemsize: int, shared: int) -> Tiles:
    """Tile sizes for `packed_rows` query rows over latents of `width`. The sums of 64 x 512 in float32 take half of the
    registers of 8 warps. Products of float32 are unrolled: see prefill_tiles.

    shared: bytes of shared memory that a program may have.
    """
    if itemsize == 4:
        return Tiles(LEAST, LEAST, warps=8, stages=2)
    rows = min(max(LEAST, triton.next_power_of_2(packed_rows)), 64)
    if rows == 64 and width <= 512 and shared >= LARGE:
        return Tiles(64, 32, warps=8, stages=2)
    return Tiles(min(rows, 32), 32 if width <= 512 else LEAST, warps=4, stages=2)


@triton.jit(do_not_specialize=["rotary_query_token", "rotary_query_head", "table_row", "window", "max_query", "splits"])
def latent_kernel(
    query, rotary_query, latents, rotaries, out, partial, stats, query_starts, kv_lengths, page_table,
    query_token, query_head, rotary_query_token, rotary_query_head, latent_page, latent_token, rotary_page,
    rotary_token, table_row, score_scale, window, max_query, splits,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, RANK_DIM: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr, WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes one split of one block of a row's query rows. DIRECT: there is only one split, so the program normalises
    and writes the output itself."""
    split, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    begin = first_key(length, queries, window, TILE, WINDOW)
    span = split_span(begin, length, splits, TILE)
    first = begin + split * span
    last = tl.minimum(first + span, length)
    if (first < last) & (block * ROWS < queries * HEADS):
        packed = block * ROWS + tl.arange(0, ROWS)
        token, head = packed // HEADS, packed % HEADS
        mine = token < queries
        dims, rotary_dims = tl.arange(0, RANK_DIM), tl.arange(0, ROTARY_DIM)
        nth = (start + token).to(tl.int64)
        at = query + nth * query_token + head * query_head
        q = load_rows(at[:, None] + dims[None, :], mine, dims < RANK, True, RANK != RANK_DIM)
        at = rotary_query + nth * rotary_query_token + head * rotary_query_head
        rotary_q = load_rows(at[:, None] + rotary_dims[None, :], mine, rotary_dims < ROTARY, True, ROTARY != ROTARY_DIM)

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, RANK_DIM], tl.float32)
        position = length - queries + token
        table = page_table + row.to(tl.int64) * table_row
        whole = first  # keys [first, whole) are seen by all queries
        if not WINDOW:
            whole = tl.maximum(tl.minimum(last, length - queries + 1) // TILE * TILE, first)
            acc, peak, total = attend_latent_tiles(
                acc, peak, total, q, rotary_q, first, whole, position, length, window, latents, rotaries, table,
                latent_page, latent_token, rotary_page, rotary_token, score_scale,
                PAGE, RANK, RANK_DIM, ROTARY, ROTARY_DIM, TILE, False, WINDOW, UPCAST,
            )  # fmt: skip
        acc, peak, total = attend_latent_tiles(
            acc, peak, total, q, rotary_q, whole, last, position, length, window, latents, rotaries, table,
            latent_page, latent_token, rotary_page, rotary_token, score_scale,
            PAGE, RANK, RANK_DIM, ROTARY, ROTARY_DIM, TILE, True, WINDOW, UPCAST,
        )  # fmt: skip

        stored = mine[:, None] & (dims < RANK)[None, :]
        if DIRECT:
            at = (nth * HEADS + head) * RANK
            tl.store(out + at[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)
        else:
            at = ((row.to(tl.int64) * max_query + token) * HEADS + head) * splits + split
            tl.store(partial + at[:, None] * RANK + dims[None, :], acc, mask=stored)
            tl.store(stats + at * 2, peak, mask=mine)
            tl.store(stats + at * 2 + 1, total, mask=mine)


@triton.jit
def attend_latent_tiles(
    acc, peak, total, q, rotary_q, first, last, position, length, window, latents, rotaries, table,
    latent_page, latent_token, rotary_page, rotary_token, score_scale,
    PAGE: tl.constexpr, RANK: tl.constexpr, RANK_DIM: tl.constexpr, ROTARY: tl.constexpr, ROTARY_DIM: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Does what attend_tiles (tile.py) does. Keys have two parts: q [rows, RANK_DIM] multiplies the latents, and
    rotary_q [rows, ROTARY_DIM] the rotary keys. The latents are the values too."""
    dims, rotary_dims = tl.arange(0, RANK_DIM), tl.arange(0, ROTARY_DIM)
    inside = tl.arange(0, TILE)
    page_of, place = inside // PAGE, inside % PAGE
    next_page = tl.load(table + first // PAGE + page_of, mask=first + inside < length, other=0)
    for start in range(first, last, TILE):
        at = start + inside
        there = at < length
        page = next_page.to(tl.int64)
        rows = page * latent_page + (place + start % PAGE) * latent_token
        rotary_rows = page * rotary_page + (place + start % PAGE) * rotary_token
        next_page = tl.load(table + (start + TILE) // PAGE + page_of, mask=at + TILE < length, other=0)
        at_latent = latents + (rows[:, None] + dims[None, :])
        latent = plain(load_rows(at_latent, there, dims < RANK, MASKED, RANK != RANK_DIM), q.dtype)
        at_rotary = rotaries + (rotary_rows[:, None] + rotary_dims[None, :])
        rotary = plain(load_rows(at_rotary, there, rotary_dims < ROTARY, MASKED, ROTARY != ROTARY_DIM), q.dtype)

        score = dot(rotary_q, tl.trans(rotary), tl.zeros([q.shape[0], TILE], tl.float32), UPCAST)
        score = dot(q, tl.trans(latent), score, UPCAST)
        factor = score_scale
        if MASKED:
            seen = (at[None, :] <= position[:, None]) & there[None, :]
            if WINDOW == CHUNKED:
                seen = seen & (at[None, :] >= position[:, None] // window * window)
            elif WINDOW == WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
            score = tl.where(seen, score * factor, UNSEEN)  # scaled before `where`: see attend_tiles
            factor = 1.0

        higher = tl.maximum(peak, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weight, 1)
        acc = dot(weight.to(latent.dtype), latent, acc * shrink[:, None], UPCAST)
    return acc, peak, total


def latent_decode(
    q: Tensor,
    rotary_q: Tensor,
    latents: Tensor,
    rotaries: Tensor,
    batch: PagedBatch,
    out: Tensor,
    scratch: Scratch,
    softmax: Softmax,
    *,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Writes `out` [tokens, heads, rank], contiguous, for the rows of `batch`: sums of latents.

    q [tokens, heads, rank] and rotary_q [tokens, heads, rotary width]; their last dimension has stride 1.
    latents, rotaries: a block's pages, [pages, page_size, 1, width].
    `splits` and `tiles` are derived from the shapes; benchmarks set them.
    """
    assert q.stride(2) == rotary_q.stride(2) == 1 and softmax.is_plain
    latents, rotaries = readable(latents), readable(rotaries)
    heads, rank, rotary, page_size = q.shape[1], q.shape[2], rotary_q.shape[2], latents.shape[1]
    rows, max_query = batch.kv_lengths.numel(), batch.max_query
    rank_dim, rotary_dim = (max(LEAST, triton.next_power_of_2(width)) for width in (rank, rotary))
    tiles = tiles or latent_tiles(max_query * heads, rank_dim, q.element_size(), shared_memory(q.device))
    assert tiles.keys % page_size == 0 or page_size % tiles.keys == 0
    blocks = triton.cdiv(max_query * heads, tiles.rows)
    if splits is None:
        most = PARTIAL_BYTES // (rows * max_query * heads * rank * 4)
        splits = max(1, min(split_count(rows, blocks, batch.max_kv, scratch.processors), most))
    pieces = rows * max_query * heads * splits
    partial, stats = scratch.take(pieces * rank, pieces * 2) if splits > 1 else (out, out)
    window, reaching = reach(softmax)
    latent_kernel[(splits, blocks, rows)](
        q, rotary_q, latents, rotaries, out, partial, stats, batch.query_starts, batch.kv_lengths, batch.page_table,
        q.stride(0), q.stride(1), rotary_q.stride(0), rotary_q.stride(1), *block_strides(latents)[:2],
        *block_strides(rotaries)[:2], batch.page_table.stride(0), score_factors(softmax)[0], window, max_query, splits,
        HEADS=heads, PAGE=page_size, RANK=rank, RANK_DIM=rank_dim, ROTARY=rotary, ROTARY_DIM=rotary_dim,
        ROWS=tiles.rows, TILE=tiles.keys, DIRECT=splits == 1, WINDOW=reaching, UPCAST=INTERPRETED,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, rows, max_query)](
            partial, stats, out, batch.query_starts, batch.kv_lengths, q, window, max_query, splits,
            HEADS=heads, VALUE=rank, VALUE_DIM=triton.next_power_of_2(rank), TILE=tiles.keys, SPLITS=COMBINED_AT_ONCE,
            WINDOW=reaching, SINKS=False, num_warps=4,
        )  # fmt: skip
