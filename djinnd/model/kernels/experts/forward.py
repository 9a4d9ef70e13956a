"""The forward of stacked experts: x, the router's picks and their weights → the weighted sum of the picked experts.

    few pairs     product, product, sum
    more          grouping, product, product, sum

Every launch has a fixed grid for the shape of the batch, so a captured graph may hold them. An expert is read once for
every tile of its pairs, and most experts have one tile. On the way between the products there are only pairs: [pairs,
width] and [pairs, hidden] in x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from djinnd.model.kernels.experts.gating import NONE, Activation
from djinnd.model.kernels.experts.grouping import Groups, group_pairs
from djinnd.model.kernels.experts.matrices import Matrices
from djinnd.model.kernels.experts.product import grouped_kernel, sum_kernel, vector_kernel
from djinnd.model.kernels.launching.gpu import shared_memory
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.tuning import CODED_PAIRS, CODED_TILES, PAIR_TILES, UNROLLED

_BLOCK = 1024  # columns of a program of sums


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs, rows of W, and bytes of their codes or columns in a tile, and Triton's launch options. `pairs` is 1 if
    nothing is grouped."""

    pairs: int
    rows: int
    width: int
    warps: int
    stages: int


def pairs_of_tile(rows: int, picks: int, experts: int, *, is_plain: bool = True) -> int:
    """How many pairs a tile has. 1: there are so few pairs that experts are seldom picked twice."""
    pairs, sizes = rows * picks, PAIR_TILES if is_plain else CODED_TILES
    if rows == 1 or pairs <= experts // 4:
        return 1
    return next((size for most, size in sizes if pairs <= most * experts), sizes[-1][1])


def reads_codes(rows: int, picks: int, experts: int) -> bool:
    """Returns True if the kernels should read codes. With many pairs, a code would be decoded again for each tile."""
    return rows * picks <= CODED_PAIRS * experts


def turning_rows(picks: int, experts: int) -> list[int]:
    """The fewest rows for each set of kernels that a batch may launch."""
    most = [experts // 4, *(each * experts for each, _ in (*PAIR_TILES[:-1], *CODED_TILES[:-1])), CODED_PAIRS * experts]
    return sorted({1, *(max(pairs // picks + 1, 2) for pairs in most)})


def _most_pairs(matrices: Matrices) -> int:
    """The most pairs of a tile. Triton 3.6 cannot compile runs of fewer than 8 bytes for Hopper's products of 64 rows
    ("Illegal shared layout"); 16 pairs make another product."""
    if matrices.is_plain:
        return PAIR_TILES[-1][1]
    return CODED_TILES[-1][1] if matrices.facts.run >= 8 else CODED_TILES[0][1]


def tiles_for(matrices: Matrices, pairs: int, element_size: int, shared: int) -> ExpertTiles:
    """Tiles are measured on an H200: of codes with experts of Qwen3-30B and of gpt-oss-20b in FP8 and MXFP4, plain ones
    with Qwen3-30B's. pairs: of a tile. shared: bytes of shared memory that a program may have."""
    facts = matrices.facts
    widest, columns = triton.next_power_of_2(facts.row_bytes), 2 if facts.span else 1  # columns: of a byte
    if pairs == 1:
        if matrices.is_transposed:
            return ExpertTiles(1, 64, 32, 4, 1)
        if matrices.is_plain:
            return ExpertTiles(1, 2, min(1024, widest), 2, 1)
        width = 2048 // columns
        if facts.row_bytes > width and facts.row_bytes % width:  # most of a wide second tile would lie outside of W
            return ExpertTiles(1, 4, 512, 2, 1)
        return ExpertTiles(1, 2, min(width, widest), 1, 1)
    if not matrices.is_plain:
        if element_size == 4:  # float32 takes long to compile
            return ExpertTiles(pairs, 64, min(32, widest), 4, 3)
        return ExpertTiles(pairs, 128, min(128 // columns, widest), 4, 3)
    sizes = {16: (128, 128, 4, 4), 32: (256, 64, 8, 3), 64: (256, 64, 8, 4), 128: (256, 64, 8, 4)}
    tiles = ExpertTiles(pairs, *sizes[pairs])
    tiles = replace(tiles, width=min(max(tiles.width * 2 // element_size, 16), max(widest, 16)))
    fitting = shared // (element_size * tiles.width * (tiles.rows + pairs))
    return replace(tiles, stages=max(1, min(tiles.stages, fitting)))


def experts_forward(
    x: Tensor,
    picked: Tensor,
    weights: Tensor,
    first: Matrices,
    second: Matrices,
    activation: Activation,
    real: Tensor | None = None,
    *,
    tiles: tuple[ExpertTiles, ExpertTiles] | None = None,
) -> Tensor:
    """→ [rows, hidden], in x's dtype.

    x: [rows, hidden]. picked: int [rows, picks]; a pick outside of the experts counts nothing. weights: [rows, picks],
    x's dtype or float32. first: [experts, 2 * width, hidden]; [experts, width, hidden] if there is no gate. second:
    [experts, hidden, width].
    real: int32 [1] on the device, the rows before the padding; rows of padding become 0. None: there is no padding.
    tiles: derived from the shapes; benchmarks set them.
    """
    rows, picks = picked.shape
    pairs, width = rows * picks, second.cols
    assert (
        first.rows == width * (2 if activation.is_gated else 1)
        and first.cols == second.rows == x.shape[1]
        and first.experts == second.experts
    )
    assert x.shape[0] == weights.shape[0] == rows and weights.shape[1] == picks
    x, picked, weights = x.contiguous(), picked.contiguous(), weights.contiguous()
    if tiles is None:
        is_plain, shared = first.is_plain and second.is_plain, shared_memory(x.device)
        size = pairs_of_tile(rows, picks, first.experts, is_plain=is_plain)
        size = min(size, _most_pairs(first), _most_pairs(second))
        tiles = (
            tiles_for(first, size, x.element_size(), shared),
            tiles_for(second, size, x.element_size(), shared),
        )
    groups = None if tiles[0].pairs == 1 else group_pairs(picked, first.experts, tiles[0].pairs, real)
    between = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    results = torch.empty(pairs, second.rows, dtype=x.dtype, device=x.device)
    _multiply(first, x, between, picked, groups, activation, real, tiles[0], is_shared=True)
    _multiply(second, between, results, picked, groups, Activation(NONE.value), real, tiles[1], is_shared=False)
    out = torch.empty_like(x)
    block = min(_BLOCK, triton.next_power_of_2(second.rows))
    sum_kernel[(triton.cdiv(second.rows, block), rows)](
        results, picked, picked if real is None else real, weights, out, pairs, first.experts,
        WIDTH=second.rows, BLOCK=block, PICKS=picks, PADDED=real is not None, PLAINLY=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


def _multiply(
    matrices: Matrices,
    x: Tensor,
    out: Tensor,
    picked: Tensor,
    groups: Groups | None,
    activation: Activation,
    real: Tensor | None,
    tiles: ExpertTiles,
    *,
    is_shared: bool,
) -> None:
    """x: [rows, cols] if `is_shared`, else [pairs, cols] → out [pairs, rows of W, or half of them if activated]."""
    facts = matrices.facts
    words = x.view(torch.int32) if facts.span == 1 and x.element_size() == 2 else x
    bias = matrices.parts[0] if matrices.bias is None else matrices.bias
    run = min(tiles.width, facts.run)
    if groups is None and not matrices.is_plain:
        # A thread loads as many codes as it loads numbers of x in 16 bytes: nothing is exchanged between threads.
        run = min(run, 16 // x.element_size() // (2 if facts.span == 1 else 1))
    arguments = (
        *matrices.parts, bias, x, words, out, picked.numel(), matrices.experts, matrices.rows, facts.step,
        activation.alpha, activation.limit,
    )  # fmt: skip
    options = matrices.options(x.device) | {
        "ROWS": tiles.rows, "RUNS": tiles.width // run, "RUN": run, "STAGES": tiles.stages, "PLAINLY": INTERPRETED,
        "ACTIVATION": activation.kind, "TURNS": activation.is_interleaved, "PICKS": picked.shape[1],
        "SHARED": is_shared, "num_warps": tiles.warps,
    }  # fmt: skip
    programs = triton.cdiv(matrices.rows, tiles.rows)
    if groups is None:
        steps = triton.cdiv(facts.row_bytes, tiles.width)
        unrolled = triton.cdiv(steps, triton.cdiv(steps, UNROLLED))
        vector_kernel[(programs, picked.numel())](
            picked, picked if real is None else real, *arguments, PADDED=real is not None, UNROLLED=unrolled, **options
        )
        return
    grouped_kernel[(len(groups.owners), programs)](groups.order, groups.owners, *arguments, SIZE=groups.size, **options)
