"""How the device budget is divided for one model: weights, workspace of a step, KV pages; and how many pages the tiers
below the device have."""

from __future__ import annotations

from dataclasses import dataclass

from djinn_client.placing import Placing
from djinnd.kvcache.manager import page_size_for
from djinnd.kvcache.tier import MAX_SLOTS
from djinnd.model.sampler import TEMPORARY_BYTES
from djinnd.weights.plan import PAGES_SHARE, Place, Plan

MIN_TOKENS = 512  # a model is not worth loading for shorter sessions
FULL_SESSIONS = 64  # automatic KV: never more than so many sessions of full length could use
_SHARE = 0.5  # automatic KV: of what the budget has left, so that a second model can still be loaded
_FLOOR = 1 / 32  # automatic KV: of the budget, before weights get any of it
LOGIT_ROWS = 256  # rows of logits that exist at once
ROWS_AT_HAND = 32  # hidden states that are captured, and as many that are held, before memory is asked for them
HOST_PAGE = 4096  # bytes: where a slot of a lower tier begins, for pinning and for direct I/O

# Automatic tiers: so many times the device's pool, and never more than a part of what is free.
_HOST_POOLS, _HOST_SHARE = 2, 4
_DISK_POOLS, _DISK_SHARE = 4, 10
_DISK_MOST = 0.75  # of what is free, whatever was asked for


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model that its memory follows from."""

    num_blocks: int
    kv_heads: int
    head_dim: int
    width: int
    widest: int  # the largest output of any projection
    vocab: int
    itemsize: int  # of KV and activations, bytes
    max_positions: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all blocks."""
        return self.num_blocks * 2 * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class KvPlan:
    page_size: int  # tokens
    page_bytes: int
    num_pages: int  # with the scratch page
    max_context: int  # tokens


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Bytes that are free: of the host's memory, of shared memory, of the disk for pages (0: there is none)."""

    memory: int
    shared: int
    disk: int


@dataclass(frozen=True, slots=True)
class TierPages:
    """Pages that the tiers below the device have room for; 0: there is no such tier."""

    host: int
    disk: int


def workspace_bytes(shape: ModelShape, max_batch_tokens: int) -> int:
    """Activations of the largest step, captured and eager; those at hand for sessions that stop or capture; logits of
    its rows, and what the sampler makes of them."""
    activations = 2 * max_batch_tokens * (6 * shape.width + 3 * shape.widest) * shape.itemsize
    activations += 2 * ROWS_AT_HAND * shape.width * shape.itemsize
    return activations + LOGIT_ROWS * shape.vocab * (shape.itemsize + 4) + TEMPORARY_BYTES


def kv_floor(shape: ModelShape, wanted: int, budget: int) -> int:
    """Bytes of pages that come before weights: those asked for, or a small part of the budget."""
    size = page_size_for(shape.token_bytes)
    pages = -(-min(MIN_TOKENS, shape.max_positions) // size) + 1
    return max(wanted or int(budget * _FLOOR), pages * size * shape.token_bytes)


def pages_share(wanted: int) -> float:
    """Of what packed blocks leave, the part that is kept for pages: none where so many bytes have been asked for, which
    have been set aside."""
    return 0.0 if wanted else PAGES_SHARE


def takes_all(placing: Placing, places: Plan) -> bool:
    """Whether a model's pages may have all that its blocks leave: they do not fit plain, so no second model would."""
    return placing.resident is None and places.count(Place.PLAIN) < len(places.places)


def plan_kv(shape: ModelShape, free: int, floor: int, wanted: int, max_context: int, takes_all: bool = False) -> KvPlan:
    """`free`: bytes left when weights and workspace are placed; `wanted`: bytes asked for, 0 for automatic: then half
    of what is free (all of it where the model takes all), or `floor` where that is more and there is as much."""
    size = page_size_for(shape.token_bytes)
    page_bytes = size * shape.token_bytes
    context = min(max_context or shape.max_positions, shape.max_positions)
    least = -(-min(MIN_TOKENS, context) // size) + 1
    if wanted:
        pages = max(wanted // page_bytes, least)
    else:
        full = FULL_SESSIONS * -(-context // size) + 1
        share = free if takes_all else int(free * _SHARE)
        pages = max(min(max(share, min(floor, free)) // page_bytes, full), least)
    return KvPlan(size, page_bytes, pages, min(context, (pages - 1) * size))


def slot_bytes(page_bytes: int) -> int:
    """Of a page in host memory or in a file."""
    return -(-page_bytes // HOST_PAGE) * HOST_PAGE


def tier_pages(page_bytes: int, pool_bytes: int, host: int | None, disk: int | None, room: HostRoom) -> TierPages:
    """`pool_bytes`: of the device's pool; `host`, `disk`: bytes asked for, or None for automatic. Nobody gets more
    disk than a part of what is free, nor more slots than a table may have."""
    if host is None:
        host = min(_HOST_POOLS * pool_bytes, room.memory // _HOST_SHARE, room.shared // _HOST_SHARE)
    if disk is None:
        disk = min(_DISK_POOLS * pool_bytes, room.disk // _DISK_SHARE)
    disk = min(disk, int(room.disk * _DISK_MOST))
    size = slot_bytes(page_bytes)
    return TierPages(min(host // size, MAX_SLOTS), min(disk // size, MAX_SLOTS))
