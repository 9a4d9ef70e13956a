"""How the device budget is divided for one model: weights, workspace of a step, KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.kvcache.manager import page_size_for
from djinnd.model.sampler import TEMPORARY_BYTES

MIN_TOKENS = 512  # a model is not worth loading for shorter sessions
FULL_SESSIONS = 64  # automatic KV: never more than so many sessions of full length could use
_SHARE = 0.5  # automatic KV: of what the budget has left, so that a second model can still be loaded
LOGIT_ROWS = 256  # rows of logits that exist at once


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


def workspace_bytes(shape: ModelShape, max_batch_tokens: int) -> int:
    """Activations of the largest step, captured and eager; logits of its rows, and what the sampler makes of them."""
    activations = 2 * max_batch_tokens * (6 * shape.width + 3 * shape.widest) * shape.itemsize
    return activations + LOGIT_ROWS * shape.vocab * (shape.itemsize + 4) + TEMPORARY_BYTES


def least_bytes(shape: ModelShape, max_batch_tokens: int) -> int:
    """What a model needs beside its weights to be served at all."""
    size = page_size_for(shape.token_bytes)
    pages = -(-min(MIN_TOKENS, shape.max_positions) // size) + 1
    return workspace_bytes(shape, max_batch_tokens) + pages * size * shape.token_bytes


def plan_kv(shape: ModelShape, free: int, wanted: int, max_context: int) -> KvPlan:
    """`free`: bytes left when weights and workspace are placed; `wanted`: bytes asked for, 0 for automatic.

    The caller has checked `least_bytes`. Wanting more than is free is the budget's OutOfMemory to raise.
    """
    size = page_size_for(shape.token_bytes)
    page_bytes = size * shape.token_bytes
    context = min(max_context or shape.max_positions, shape.max_positions)
    least = -(-min(MIN_TOKENS, context) // size) + 1
    if wanted:
        pages = max(wanted // page_bytes, least)
    else:
        full = FULL_SESSIONS * -(-context // size) + 1
        pages = max(min(int(free * _SHARE) // page_bytes, full), least)
    return KvPlan(size, page_bytes, pages, min(context, (pages - 1) * size))
