"""Attention of rows that bring many tokens: bound by the matrix units, so tiles are large and masks are rare.

A program takes a block of packed query rows (tile.py) of one KV head and walks over the keys that any of them sees.
Only tiles on the causal diagonal and on the window's edge are masked; history before this step's tokens is read from
the same pages as they are.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def prefill_tiles(packed_rows: int, dim: int, itemsize: int, hopper: bool) -> Tiles:
    """A Hopper warpgroup of 4 warps takes 64 rows; others have half the shared memory or less. Two warpgroups share the
    tiles that they load, which pays once there are programs enough to fill the device."""
    if dim * itemsize > 256:
        return Tiles(64, 32, warps=4, stages=2)
    if not hopper:
        return Tiles(64, 64, warps=4, stages=2)
    return Tiles(64, 64, warps=4, stages=3) if packed_rows <= 512 else Tiles(128, 64, warps=8, stages=3)


@triton.jit(do_not_specialize=["table_row", "window", "skip"])
def prefill_kernel(
    query, keys, values, out, query_starts, kv_lengths, page_table, sinks,
    query_token, query_head, pool_page, pool_token, pool_head, table_row,
    score_scale, cap, window, skip,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head, row = tl.program_id(0), tl.program_id(1)
    block = tl.num_programs(2) - 1 - tl.program_id(2)  # those with the most keys start first
    start = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    if (block * ROWS >= queries * GROUP) | (queries <= skip):
        return

    packed = block * ROWS + tl.arange(0, ROWS)
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    mine = token < queries
    dims = tl.arange(0, DIM)
    query_rows = query + (start + token).to(tl.int64) * query_token + head * query_head
    q = load_rows(query_rows[:, None] + dims[None, :], mine, dims < HEAD_DIM, True, HEAD_DIM != DIM)

    history = length - queries
    position = history + token
    oldest = history + block * ROWS // GROUP  # positions of the block's first and last query
    newest = tl.minimum(history + (block * ROWS + ROWS - 1) // GROUP, length - 1)
    whole_end = (oldest + 1) // TILE * TILE  # keys [whole_begin, whole_end) are seen by all of them
    begin = 0
    whole_begin = 0
    if WINDOW:
        begin = tl.minimum(tl.maximum(oldest - window + 1, 0) // TILE * TILE, whole_end)
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(newest - window + 1, 0), TILE) * TILE, whole_end)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        peak = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([ROWS, DIM], tl.float32)
    keys += kv_head * pool_head
    values += kv_head * pool_head
    table = page_table + row.to(tl.int64) * table_row
    if WINDOW:
        acc, peak, total = attend_tiles(
            acc, peak, total, q, begin, whole_begin, position, length, window,
            keys, values, table, pool_page, pool_token, score_scale, cap,
            PAGE, HEAD_DIM, DIM, TILE, True, WINDOW, CAP, UPCAST,
        )  # fmt: skip
    acc, peak, total = attend_tiles(
        acc, peak, total, q, whole_begin, whole_end, position, length, window,
        keys, values, table, pool_page, pool_token, score_scale, cap,
        PAGE, HEAD_DIM, DIM, TILE, False, WINDOW, CAP, UPCAST,
    )  # fmt: skip
    acc, peak, total = attend_tiles(
        acc, peak, total, q, whole_end, newest + 1, position, length, window,
        keys, values, table, pool_page, pool_token, score_scale, cap,
        PAGE, HEAD_DIM, DIM, TILE, True, WINDOW, CAP, UPCAST,
    )  # fmt: skip
    at = ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM
    stored = mine[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedRows,
    out: Tensor,
    *,
    skip: int = 0,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Writes `out` [tokens, heads, head_dim] for the rows of `batch` that bring more than `skip` tokens, no others.

    `tiles` are chosen from the shapes unless a measurement gives them.
    """
    assert q.stride(2) == 1
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    group, dim = heads // kv_heads, triton.next_power_of_2(head_dim)
    packed_rows = batch.max_query * group
    tiles = tiles or prefill_tiles(packed_rows, dim, q.element_size(), _is_hopper(q.device))
    assert tiles.keys % page_size == 0 or page_size % tiles.keys == 0
    prefill_kernel[(kv_heads, batch.kv_lengths.numel(), triton.cdiv(packed_rows, tiles.rows))](
        q, keys, values, out, batch.query_starts, batch.kv_lengths, batch.page_table, q if sinks is None else sinks,
        q.stride(0), q.stride(1), *pool_strides(keys, values), batch.page_table.stride(0),
        *score_factors(scale, softcap), window, skip,
        HEADS=heads, GROUP=group, PAGE=page_size, HEAD_DIM=head_dim, DIM=dim, ROWS=tiles.rows, TILE=tiles.keys,
        WINDOW=window > 0, CAP=softcap > 0, SINKS=sinks is not None, UPCAST=INTERPRETED,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
