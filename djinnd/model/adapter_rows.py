"""AdapterRows: which tokens of a step go through which resident adapter.

    order   │ tokens of adapter a, ascending │ tokens of adapter b │ …    tokens without an adapter are left out
    tiles   │ (a, 0, 16) │ (a, 16, 4)        │ (b, 20, 1)          │ …    at most `size` tokens of one adapter

The products of both implementations follow the tiles: loops over tensors on the CPU, programs of a kernel on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

TILE_FIELDS = 3
NO_SLOT = -1

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tensors are on the device; a captured graph keeps their addresses."""

    order: Tensor  # int32 [tokens]
    tiles: Tensor  # int32 [tiles, TILE_FIELDS]: slot, first in `order`, count; slot NO_SLOT: nothing, also behind it


def most_tiles(tokens: int, rows: int, size: int) -> int:
    """The most tiles that `rows` rows of `tokens` tokens can have, with at most one adapter a row."""
    return min(tokens, rows + tokens // size)


def fill_tiles(slots: Sequence[int], counts: Sequence[int], size: int, order: Ints, tiles: Ints) -> None:
    """Fills `order` [tokens] and `tiles` [≥ most_tiles, TILE_FIELDS] for rows with these slots and counts of tokens.
    `size`: tokens of a tile. A row without an adapter has NO_SLOT."""
    of_token = np.repeat(np.asarray(slots, np.int32), counts)
    chosen = np.argsort(of_token, kind="stable")[np.count_nonzero(of_token == NO_SLOT) :]
    order[: len(chosen)] = chosen
    found, starts, lengths = np.unique(of_token[chosen], return_index=True, return_counts=True)
    parts = -(-lengths // size)
    which = np.repeat(np.arange(len(found)), parts)
    offsets = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
    tiles[: len(which), 0] = found[which]
    tiles[: len(which), 1] = starts[which] + offsets
    tiles[: len(which), 2] = np.minimum(size, lengths[which] - offsets)
    tiles[len(which) :, 0] = NO_SLOT
