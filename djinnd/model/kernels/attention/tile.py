"""The inner loop that decode and prefill attention share: a block of query rows over tiles of paged keys and values.

Query rows are packed: all heads of a group that read one KV head are rows of one block, so that a tile is loaded once
for all of them. Row r of a block is token r // GROUP and head r % GROUP of the group.

The softmax is the online softmax of FlashAttention (Dao et al., 2022) in powers of two: scores are multiplied by
log2(e), so that exp2 replaces exp. For each row, `peak` is the running maximum, `total` the running denominator, and
`acc` the unnormalised output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.attention.fp8 import plain
from djinnd.model.kernels.launching.interpreter import dot
from djinnd.model.paged_batch import Softmax

LOG2_E = tl.constexpr(math.log2(math.e))

# Score of a key that a query does not see. It is finite so that a row needs no special case before its first key: sums
# up to then are multiplied by exp2(UNSEEN - peak) = 0 when the first key comes. Each row sees at least its own key.
UNSEEN = tl.constexpr(-1.0e30)

# Values of the kernels' constant WINDOW. The argument `window` has the tokens of the window or of a chunk.
UNBOUNDED, WINDOWED, CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows and keys of a tile, and Triton's launch options."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def load_rows(pointers, row_mask, dim_mask, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Loads a tile [rows, dims] with only the masks that are needed. A load without masks is a plain vector copy."""
    if MASK_ROWS and MASK_DIMS:
        return tl.load(pointers, mask=row_mask[:, None] & dim_mask[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=row_mask[:, None], other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=dim_mask[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """The first key that the query at `position` sees."""
    if WINDOW == CHUNKED:
        return position // window * window
    else:
        return tl.maximum(position - window + 1, 0)


@triton.jit
def attend_tiles(
    acc, peak, total, q, first, last, position, length, window,
    keys, values, table, key_page, key_token, value_page, value_token, score_scale, cap,
    PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attends with the queries q [rows, KEY_DIM] at `position` [rows] over the keys [first, last), tile by tile.
    `first` is a multiple of TILE; TILE divides PAGE or PAGE divides TILE. → acc, peak, total.

    keys, values: base of one KV head in one block of the pool, with strides by page and token; in the dtype of q or in
    FP8 (fp8.py). table: the session's page ids. KEY, VALUE: widths; KEY_DIM, VALUE_DIM: the powers of two that hold
    them.
    MASKED: applies causality, the window or chunk, and the session's length. Without it, every query sees every key
    of the range.

    Memory past `length` is never read, because it may hold NaN of an earlier session, and 0 * NaN is NaN. Page ids are
    read one tile ahead, so that addresses do not wait for them.
    """
    key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    inside = tl.arange(0, TILE)
    page_of = inside // PAGE  # page within the tile; 0 if a page holds several tiles
    key_row_of, value_row_of = (inside % PAGE) * key_token, (inside % PAGE) * value_token
    next_page = tl.load(table + first // PAGE + page_of, mask=first + inside < length, other=0)
    for start in range(first, last, TILE):
        at = start + inside
        there = at < length
        page = next_page.to(tl.int64)
        key_rows = page * key_page + (key_row_of + start % PAGE * key_token)
        value_rows = key_rows  # equal widths have equal strides
        if KEY != VALUE:
            value_rows = page * value_page + (value_row_of + start % PAGE * value_token)
        next_page = tl.load(table + (start + TILE) // PAGE + page_of, mask=at + TILE < length, other=0)
        at_k = keys + (key_rows[:, None] + key_dims[None, :])
        k = plain(load_rows(at_k, there, key_dims < KEY, MASKED, KEY != KEY_DIM), q.dtype)
        at_v = values + (value_rows[:, None] + value_dims[None, :])
        v = plain(load_rows(at_v, there, value_dims < VALUE, MASKED, VALUE != VALUE_DIM), q.dtype)

        score = dot(q, tl.trans(k), tl.zeros([q.shape[0], TILE], tl.float32), UPCAST)
        factor = score_scale
        if CAP:  # cap * tanh(score / cap), with tanh x = 1 - 2 / (exp 2x + 1)
            score = 1.0 - 2.0 / (tl.exp2(score * score_scale) + 1.0)
            factor = cap
        if MASKED:
            seen = (at[None, :] <= position[:, None]) & there[None, :]
            if WINDOW == CHUNKED:
                seen = seen & (at[None, :] >= position[:, None] // window * window)
            elif WINDOW == WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
            # Scaled before `where`: if a row sees no key of a tile, `score * factor - higher` must be exactly 0. A
            # fused multiply-add of UNSEEN would leave the rounding error of the product, which is huge.
            score = tl.where(seen, score * factor, UNSEEN)
            factor = 1.0

        higher = tl.maximum(peak, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weight, 1)
        acc = dot(weight.to(v.dtype), v, acc * shrink[:, None], UPCAST)
    return acc, peak, total


def score_factors(softmax: Softmax) -> tuple[float, float]:
    """→ (score_scale, cap) for `attend_tiles`, multiplied by log2(e). Both are positive if used."""
    if softmax.softcap:
        return 2.0 * LOG2_E.value * softmax.scale / softmax.softcap, LOG2_E.value * softmax.softcap
    return LOG2_E.value * softmax.scale, 0.0


def reach(softmax: Softmax) -> tuple[int, int]:
    """→ the kernels' `window` and WINDOW."""
    if softmax.chunk:
        assert not softmax.window
        return softmax.chunk, CHUNKED.value
    return softmax.window, WINDOWED.value if softmax.window else UNBOUNDED.value


def pool_strides(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Strides by page, token and head of keys, then of values, in one pool. Equal widths have equal strides."""
    assert keys.shape[3] != values.shape[3] or keys.stride() == values.stride()
    return (*block_strides(keys), *block_strides(values))


def width_options(x: Tensor, name: str) -> dict[str, int]:
    """The kernels' constants for the width of keys ("KEY") or values ("VALUE")."""
    return {name: x.shape[3], f"{name}_DIM": triton.next_power_of_2(x.shape[3])}


def padded_width(keys: Tensor, values: Tensor) -> int:
    """The power of two that holds the widths of both."""
    return triton.next_power_of_2(max(keys.shape[3], values.shape[3]))


def block_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides by page, token and head of keys or values [pages, page_size, kv_heads, width]."""
    assert x.stride(3) == 1
    return x.stride(0), x.stride(1), x.stride(2)
