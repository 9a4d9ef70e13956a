"""Attention of a batch with prefill chunks and decode rows: prefill.py and decode.py, each in a launch of its own.

The number of rows of each kind changes from step to step, but the grid of a captured graph does not. So each kind has a
fixed number of programs, no more than it can use and the device can hold. They take one piece of work after another,
and find the work in `worklist` and `extent` (djinnd/model/attention/worklist.py). A grid for all possible rows would
have tens of thousands of programs without work, at some nanoseconds each. A third kernel combines the pieces of either
kind. A decode step of more than a few rows is such a batch without chunks.

Both kinds in one launch (as in POD-Attention: Kamath et al., 2025) were slower: a processor has registers for one
program of a chunk, so it also read the keys of one decode row at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.attention.decode import (
    COMBINED_AT_ONCE,
    LONGEST_SPLIT,
    SHORTEST_SPLIT,
    attend_split,
    combine_splits,
    decode_tiles,
    split_bounds,
    splits_to_fill,
)
from djinnd.model.kernels.attention.fp8 import readable
from djinnd.model.kernels.attention.prefill import (
    attend_block,
    chunk_splits,
    combine_blocks,
    prefill_splits,
    prefill_tiles,
)
from djinnd.model.kernels.attention.tile import Tiles, padded_width, pool_strides, reach, score_factors, width_options
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax

# A processor's share: SINGLES splits of rows with one token, if there are fewer rows, and at most PROGRAMS programs for
# these and COMBINING to combine. Measured on an H200: 256 rows of 544 tokens with 8 KV heads take 155 µs with 6 to 32
# programs, and 185 with 4.
SINGLES, PROGRAMS, COMBINING = tl.constexpr(6), 16, 16
NO_LIMIT = 1 << 30


@triton.jit(do_not_specialize=["table_row", "window", "most_splits", "filling"])
def chunks_kernel(
    query, keys, values, out, partial, stats, page_table, worklist, extent, sinks,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    score_scale, cap, window, most_splits, filling,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes the blocks of all chunks."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    chunks, blocks, splits = chunks_of(extent, KV_HEADS, GROUP, ROWS, most_splits, filling)
    for piece in range(tl.program_id(0), chunks * blocks * splits * KV_HEADS, tl.num_programs(0)):
        row, start, queries, length = work_at(worklist, piece // KV_HEADS % chunks)
        later = piece // (KV_HEADS * chunks)  # the blocks with the most keys come first
        attend_block(
            row, start, queries, length, piece % KV_HEADS, blocks - 1 - later // splits, later % splits,
            query, keys, values, out, partial, stats, page_table, sinks,
            query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
            score_scale, cap, window, splits,
            HEADS, GROUP, PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, ROWS, TILE, DIRECT, WINDOW, CAP, SINKS, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "window", "useful", "needed", "shortest", "longest",
                               "processors"])  # fmt: skip
def singles_kernel(
    query, keys, values, out, partial, stats, page_table, worklist, extent, sinks,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    score_scale, cap, window, useful, needed, shortest, longest, processors,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes the splits of all rows with one token."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    chunks, singles, splits = singles_of(extent, KV_HEADS, useful, needed, shortest, longest, processors)
    for piece in range(tl.program_id(0), singles * splits * KV_HEADS, tl.num_programs(0)):
        nth = piece // (KV_HEADS * splits)
        row, start, _, length = work_at(worklist, chunks + nth)
        attend_split(
            piece % splits, piece // splits % KV_HEADS, row, start, 1, length, nth,
            query, keys, values, out, partial, stats, page_table, sinks,
            query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
            score_scale, cap, window, splits,
            HEADS, GROUP, PAGE, KEY, KEY_DIM, VALUE, VALUE_DIM, ROWS, TILE, DIRECT, WINDOW, CAP, SINKS, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "most_chunk_splits", "filling", "useful", "needed", "shortest", "longest",
                               "processors"])  # fmt: skip
def combine_mixed_kernel(
    chunk_partial, chunk_stats, partial, stats, out, worklist, extent, sinks,
    window, most_chunk_splits, filling, useful, needed, shortest, longest, processors,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    TILE: tl.constexpr, CHUNKS_DIRECT: tl.constexpr, DIRECT: tl.constexpr, CHUNK_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one head of one token after another. Takes the bounds that the others got."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    program, programs = tl.program_id(0), tl.num_programs(0)
    if not CHUNKS_DIRECT:
        chunks, _, splits = chunks_of(extent, KV_HEADS, GROUP, CHUNK_ROWS, most_chunk_splits, filling)
        most = tl.load(extent + 1)
        for piece in range(program, chunks * most * HEADS, programs):
            _, start, queries, _ = work_at(worklist, piece // (most * HEADS))
            token = piece // HEADS % most
            if token < queries:
                combine_blocks(
                    piece % HEADS, start + token, chunk_partial, chunk_stats, out, sinks, splits,
                    HEADS, VALUE, VALUE_DIM, CHUNK_SPLITS, SINKS,
                )  # fmt: skip
    if not DIRECT:
        chunks, singles, splits = singles_of(extent, KV_HEADS, useful, needed, shortest, longest, processors)
        for piece in range(program, singles * HEADS if splits > 1 else 0, programs):
            nth = piece // HEADS
            _, token, _, length = work_at(worklist, chunks + nth)
            combine_splits(
                piece % HEADS, token, 1, length, nth, partial, stats, out, sinks, window, splits,
                HEADS, VALUE, VALUE_DIM, TILE, SPLITS, WINDOW, SINKS,
            )  # fmt: skip


@triton.jit
def chunks_of(extent, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, most, filling):
    """→ number of chunks, blocks of the longest chunk, splits of each block."""
    chunks = tl.load(extent)
    blocks = tl.cdiv(tl.load(extent + 1) * GROUP, ROWS)
    return chunks, blocks, chunk_splits(chunks * blocks * KV_HEADS, filling, most)


@triton.jit
def singles_of(extent, KV_HEADS: tl.constexpr, useful, needed, shortest, longest, processors):
    """→ index of the first row with one token, number of such rows, splits of each. `useful` and `needed`: for the most
    tokens that a row can have; fewer if no row has so many. shortest, longest: tokens of a split."""
    chunks = tl.load(extent)
    singles = tl.load(extent + 2) - chunks
    length = tl.load(extent + 3)
    useful = tl.maximum(tl.minimum(tl.cdiv(length, shortest), useful), 1)
    needed = tl.maximum(tl.minimum(tl.cdiv(length, longest), needed), 1)
    waves = tl.minimum(singles, SINGLES)
    return chunks, singles, splits_to_fill(tl.maximum(singles, 1), KV_HEADS, waves * processors, useful, needed)


@triton.jit
def work_at(worklist, nth):
    """→ the nth item: row, its first token, its tokens in this step, its tokens in KV."""
    item = worklist + nth * 4
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


class Division(NamedTuple):
    """Bounds of the splits of keys. The device chooses within them, when it knows the rows and their lengths."""

    most: int  # splits of a block of a chunk
    filling: int  # programs that fill the device with blocks
    useful: int  # most splits of a row with one token
    needed: int  # fewest splits of the longest such row
    shortest: int  # tokens of a split, so that it is useful
    longest: int  # and so that no further one is needed


def division_of(
    batch: PagedBatch, tokens: int, group: int, kv_heads: int, tiles: Tiles, processors: int, splits: int | None
) -> Division:
    """tiles: of chunks. splits: of all keys; None: derived."""
    if splits is not None:
        found = Division(splits, NO_LIMIT, splits, splits, 1, 1)
    else:  # a row with one token has the most splits if it is alone in the batch
        most = prefill_splits(tokens, group, kv_heads, batch.max_kv, tiles, processors)
        useful, needed = split_bounds(batch.max_kv)
        useful = int(splits_to_fill.fn(1, kv_heads, processors, useful, needed))
        found = Division(most, processors, useful, needed, SHORTEST_SPLIT, LONGEST_SPLIT)
    return found if batch.max_query > 1 else found._replace(most=1)


def mixed(
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

    `splits` (of chunks and of single tokens) and `tiles` (of chunks) are derived from the shapes; benchmarks set them.
    """
    assert q.stride(2) == 1
    keys, values = readable(keys), readable(values)
    tokens, heads, _ = q.shape
    value_width = values.shape[3]
    page_size, kv_heads = keys.shape[1:3]
    rows, processors = batch.kv_lengths.numel(), scratch.processors
    group, dim = heads // kv_heads, padded_width(keys, values)
    packed_rows = batch.max_query * group
    tiles = tiles or prefill_tiles(packed_rows, dim, q.element_size(), _is_hopper(q.device))
    assert tiles.keys % page_size == 0 or page_size % tiles.keys == 0
    division = division_of(batch, tokens, group, kv_heads, tiles, processors, splits)
    most, filling, useful, needed, *_ = division
    programs = kv_heads * triton.cdiv(tokens * group, tiles.rows) * most
    waves = min(rows, SINGLES.value)
    chunk_pieces = tokens * heads * most if most > 1 else 0
    pieces = heads * max(waves * processors // kv_heads + rows, rows * needed) if useful > 1 else 0
    sizes = (chunk_pieces * value_width, chunk_pieces * 2, pieces * value_width, pieces * 2)
    parts = scratch.take(*sizes) if sum(sizes) else (out,) * 4
    single = decode_tiles(group, dim, q.element_size())
    window, reaching = reach(softmax)
    alike = {"HEADS": heads, "GROUP": group, "WINDOW": reaching, "SINKS": softmax.sinks is not None}
    alike |= width_options(values, "VALUE")
    sinks = q if softmax.sinks is None else softmax.sinks
    where = (batch.page_table, batch.worklist, batch.extent, sinks)
    strides = (q.stride(0), q.stride(1), *pool_strides(keys, values), batch.page_table.stride(0))
    scores = (*score_factors(softmax), window)
    reading = {"PAGE": page_size, "CAP": softmax.softcap > 0, "UPCAST": INTERPRETED, **width_options(keys, "KEY")}
    if batch.max_query > 1:
        chunks_kernel[(programs or 1,)](
            q, keys, values, out, *parts[:2], *where, *strides, *scores, most, filling,
            ROWS=tiles.rows, TILE=tiles.keys, DIRECT=most == 1, num_warps=tiles.warps, num_stages=tiles.stages,
            **alike, **reading,
        )  # fmt: skip
    singles_kernel[(min(PROGRAMS * processors, rows * kv_heads * useful) or 1,)](
        q, keys, values, out, *parts[2:], *where, *strides, *scores, *division[2:], processors,
        ROWS=single.rows, TILE=single.keys, DIRECT=useful == 1, num_warps=single.warps, num_stages=single.stages,
        **alike, **reading,
    )  # fmt: skip
    if sum(sizes):
        combine_mixed_kernel[(min(COMBINING * processors, heads * tokens) or 1,)](
            *parts, out, batch.worklist, batch.extent, sinks, window, *division, processors,
            CHUNK_ROWS=tiles.rows if most > 1 else 1, TILE=single.keys, CHUNKS_DIRECT=most == 1, DIRECT=useful == 1,
            CHUNK_SPLITS=triton.next_power_of_2(most), SPLITS=COMBINED_AT_ONCE, num_warps=2, **alike,
        )  # fmt: skip


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
