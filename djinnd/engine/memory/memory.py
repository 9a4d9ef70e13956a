"""Divides the device budget for one model into weights, workspace of a step, and KV pages, and sizes the tiers below
the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from djinn_client.protocol.fields.kv_layout import BlockKv, aligned, token_bytes
from djinn_client.protocol.fields.placing import Placing
from djinnd.engine.tuning import (
    DISK_MOST,
    FULL_SESSIONS,
    KV_FLOOR,
    KV_SHARE,
    LOGIT_ROWS,
    MIN_TOKENS,
    ROWS_AT_HAND,
    STEP_ROWS,
)
from djinnd.kvcache.manager import page_size_for
from djinnd.kvcache.tier import whole_pages
from djinnd.kvcache.tuning import MAX_SLOTS
from djinnd.model.fp8 import FP8
from djinnd.model.sampling.sampler import TEMPORARY_BYTES
from djinnd.model.states.workspace import NOTHING, StateWorkspace
from djinnd.model.tuning import EXPANDED_BYTES, PARTIAL_BYTES
from djinnd.weights.plan import PAGES_SHARE, BlockPlace, PlacementPlan

# Automatic tiers: a multiple of the pool, but at most 1/_HOST_SHARE of the free memory, 1/_DISK_SHARE of the free disk.
# The host tier is reserved whole at load, so it is also at most a multiple of the weights (chosen): a small model whose
# pool could fill half of the device does not take gigabytes of host memory before it has a session.
_HOST_POOLS, _HOST_WEIGHTS, _HOST_SHARE = 2, 4, 4
_DISK_POOLS, _DISK_SHARE = 4, 10


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that determine its memory."""

    num_blocks: int
    kv: tuple[BlockKv, ...]  # the KV of each block
    width: int
    widest: int  # the largest dimension of any projection
    vocab: int
    itemsize: int  # bytes of an element of activations, and of KV unless it is in FP8
    max_positions: int
    state_bytes: int = 0  # of the state in a page of a hybrid model
    expanded_width: int = 0  # of the key and value that are made of a latent, for one head; 0: no latent attention
    states: StateWorkspace = NOTHING  # of the module with a state that needs most
    has_fp8_kv: bool = False

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return page_size_for(self.token_bytes, self.state_bytes)

    @property
    def page_bytes(self) -> int:
        kv = self.page_size * self.token_bytes
        return aligned(kv) + self.state_bytes if self.state_bytes else kv

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token in all blocks."""
        return token_bytes(self.kv, 1 if self.has_fp8_kv else self.itemsize)

    def kv_dtype(self, computing: torch.dtype) -> torch.dtype:
        """FP8 or `computing`."""
        return FP8 if self.has_fp8_kv else computing


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Size of a model's KV pool and its pages."""

    page_size: int  # tokens
    page_bytes: int
    num_pages: int  # includes the scratch page
    max_context: int  # tokens


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Free bytes: host memory, shared memory, and disk for pages (0: no disk tier)."""

    memory: int
    shared: int
    disk: int


@dataclass(frozen=True, slots=True)
class TierPages:
    """The number of pages in each tier below the device; 0: no such tier."""

    host: int
    disk: int


def workspace_bytes(shape: ModelShape, max_batch_tokens: int) -> int:
    """Activations of the largest step, captured and eager; the temporaries of a module with a state; rows at hand for
    captures and parked states; the step's logits, and the sampler's temporaries; keys and values that are made of
    latents."""
    activations = 2 * max_batch_tokens * (6 * shape.width + 3 * shape.widest) * shape.itemsize
    activations += 2 * ROWS_AT_HAND * shape.width * shape.itemsize
    if shape.state_bytes:  # a part of a row ends with its page
        activations += shape.states.of(min(max_batch_tokens, shape.page_size), min(max_batch_tokens, STEP_ROWS))
    if shape.expanded_width:
        expanded = max(EXPANDED_BYTES, shape.max_positions * shape.expanded_width * shape.itemsize)
        activations += 2 * expanded + PARTIAL_BYTES  # twice: products are copied to their pages
    return activations + LOGIT_ROWS * shape.vocab * (shape.itemsize + 4) + TEMPORARY_BYTES


def workspace_label(model: str) -> str:
    return f"workspace of {model}"


def kv_floor(shape: ModelShape, wanted: int, budget: int) -> int:
    """Bytes of pages that are set aside before weights are placed: the bytes asked for, or a small share of the
    budget."""
    pages = -(-min(MIN_TOKENS, shape.max_positions) // shape.page_size) + 1
    return max(wanted or int(budget * KV_FLOOR), pages * shape.page_bytes)


def pages_share(wanted: int) -> float:
    """The share for pages of the memory that packed blocks leave. 0 if a number of bytes was asked for, because those
    are set aside already."""
    return 0.0 if wanted else PAGES_SHARE


def takes_all(placing: Placing, places: PlacementPlan) -> bool:
    """True if the model's pages may take all memory that its blocks leave: not all blocks are plain, so no second model
    would fit."""
    return placing.resident is None and places.count(BlockPlace.PLAIN) < len(places.places)


def plan_kv(shape: ModelShape, free: int, floor: int, wanted: int, max_context: int, takes_all: bool = False) -> KvPlan:
    """`free`: bytes left when weights and workspace are placed. `wanted`: bytes asked for; 0: automatic.

    Automatic takes half of `free`, or all of it with `takes_all`, but at least `floor` if that much is free.
    """
    size, page_bytes = shape.page_size, shape.page_bytes
    context = min(max_context or shape.max_positions, shape.max_positions)
    least = -(-min(MIN_TOKENS, context) // size) + 1
    if wanted:
        pages = max(wanted // page_bytes, least)
    else:
        full = FULL_SESSIONS * -(-context // size) + 1
        share = free if takes_all else int(free * KV_SHARE)
        pages = max(min(max(share, min(floor, free)) // page_bytes, full), least)
    return KvPlan(size, page_bytes, pages, min(context, (pages - 1) * size))


def tier_pages(
    page_bytes: int, pool_bytes: int, weight_bytes: int, host: int | None, disk: int | None, room: HostRoom
) -> TierPages:
    """`pool_bytes`: of the device's pool. `weight_bytes`: of the model. `host`, `disk`: bytes asked for; None:
    automatic. The disk tier gets at most a share of the free disk, and each tier at most MAX_SLOTS pages."""
    if host is None:
        wanted = min(_HOST_POOLS * pool_bytes, _HOST_WEIGHTS * weight_bytes)
        host = min(wanted, room.memory // _HOST_SHARE, room.shared // _HOST_SHARE)
    if disk is None:
        disk = min(_DISK_POOLS * pool_bytes, room.disk // _DISK_SHARE)
    disk = min(disk, int(room.disk * DISK_MOST))
    size = whole_pages(page_bytes)
    return TierPages(min(host // size, MAX_SLOTS), min(disk // size, MAX_SLOTS))
