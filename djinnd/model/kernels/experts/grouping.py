"""Groups pairs of a row and an expert by expert, in tiles of equally many pairs, without the host.

    picked   int64 or int32 [rows, picks]: pair p is row p // picks
    order    int32 [tiles * size]: pairs, in groups by expert and in their own order; -1 in places that stay empty
    owners   int32 [tiles]: the expert of a tile; -1 for a tile that is not needed

Picks of no expert have no place, and neither have rows of padding. The number of tiles is the most that the shape can
need, so a captured graph may hold the launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Measured on an H200, 8 picks of 128 experts: 256 rows take 4.2 µs and 2,048 rows 19.4; 5.7 and 32.9 with 512 and 4.
CHUNK, WARPS = 2048, 8


class Groups(NamedTuple):
    """order, owners: as above. size: pairs of a tile."""

    order: Tensor
    owners: Tensor
    size: int


@triton.jit
def load_picks(picked, at, pairs, experts):
    """→ the experts of the pairs `at`; -1 for a pair without one."""
    pick = tl.load(picked + at, mask=at < pairs, other=-1).to(tl.int32)
    return tl.where(pick < experts, pick, -1)


@triton.jit
def real_pairs(real, pairs, PICKS: tl.constexpr, PADDED: tl.constexpr):
    """The number of pairs before the padding."""
    if PADDED:
        return tl.minimum(pairs, tl.maximum(tl.load(real), 0) * PICKS)
    else:
        return pairs


@triton.jit(do_not_specialize=["pairs", "experts", "size", "tiles"])
def group_pairs_kernel(
    picked, real, order, owners, pairs, experts, size, tiles,
    PICKS: tl.constexpr, PADDED: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program places the pairs of one expert. It counts those of the experts before it."""
    expert = tl.program_id(0)
    pairs = real_pairs(real, pairs, PICKS, PADDED)
    each, local = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, pairs, CHUNK):
        pick = load_picks(picked, first + local, pairs, experts)
        counts += tl.histogram(tl.maximum(pick, 0), EXPERTS, mask=pick >= 0)
    needed = (counts + size - 1) // size
    first_tile = tl.sum(tl.where(each < expert, needed, 0), 0)
    own_tiles = tl.sum(tl.where(each == expert, needed, 0), 0)
    used = tl.sum(needed, 0)
    done = 0
    order += first_tile * size
    for first in range(0, pairs, CHUNK):
        mine = load_picks(picked, first + local, pairs, experts) == expert
        rank = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + rank, first + local, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    for first in range(done, own_tiles * size, CHUNK):
        tl.store(order + first + local, tl.full([CHUNK], -1, tl.int32), mask=first + local < own_tiles * size)
    for first in range(0, own_tiles, CHUNK):
        owner = tl.zeros([CHUNK], tl.int32) + expert
        tl.store(owners + first_tile + first + local, owner, mask=first + local < own_tiles)
    if expert == 0:
        for first in range(used, tiles, CHUNK):
            tl.store(owners + first + local, tl.full([CHUNK], -1, tl.int32), mask=first + local < tiles)


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """The most tiles that the pairs can need: each expert may leave one tile incomplete."""
    return min(pairs, pairs // size + min(experts, pairs))


def group_pairs(picked: Tensor, experts: int, size: int, real: Tensor | None = None) -> Groups:
    """picked: contiguous, see above. real: int32 [1], the rows before the padding; None: there is no padding."""
    pairs, picks = picked.numel(), picked.shape[1]
    assert picked.is_contiguous() and not picked.is_floating_point()
    tiles = most_tiles(pairs, experts, size)
    order = torch.empty(tiles * size, dtype=torch.int32, device=picked.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=picked.device)
    group_pairs_kernel[(experts,)](
        picked, picked if real is None else real, order, owners, pairs, experts, size, tiles,
        PICKS=picks, PADDED=real is not None, EXPERTS=triton.next_power_of_2(experts), CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    return Groups(order, owners, size)
