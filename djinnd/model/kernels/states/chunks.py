"""Several tokens through a state, in chunks of 64: products of matrices within a chunk, and a scan from chunk to chunk.

    S ← decay S + k ⊗ rate v;  o = qᵀ S                                    Mamba 2, with q = C, k = B, v = x, rate = Δ
    S ← decay S;  S ← S + k ⊗ rate (v - kᵀ S);  o = qᵀ S                   the gated delta rule

Mamba 2: Dao and Gu, 2024, arXiv 2405.21060, section 6. Gated delta rule: Yang, Kautz and Hatamizadeh, 2024, arXiv
2412.06464, section 3.3. There, the tokens of a chunk correct each other's values. With b the sum of logarithmic decays
from the start of the chunk, the corrections are a triangular system,

    A = strict lower part of rate_i (k_i · k_j) exp(b_i - b_j),    T = (1 + A)⁻¹

and the new values are T (rate v) - T (rate exp(b) k) S with the state S before the chunk. The first kernel computes
what needs no state, for all chunks at once. The second one takes a head's state through the chunks. With a decay for
each channel of the keys (Kimi Delta Attention), a kernel before them computes the products (channel_decays.py).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like, float32

from djinnd.model.kernels.states.channel_decays import channel_scores
from djinnd.model.kernels.states.vectors import unit_vectors

CHUNK = 64
COLUMNS = 32  # of a state that a program of the scan holds


@triton.jit(do_not_specialize=["tokens"])
def chunk_kernel(
    q, k, v, decay, rate, products, reads, keys, scores, values, seen, ends, tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr, NORMALISED: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. Tokens behind the last one have no rate and no decay, so they change nothing. BY_CHANNEL:
    decays are [tokens, heads, key], `scores` are there, and `products` has those of keys: [tokens, heads, CHUNK]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, CHUNK)
    token = (chunk * CHUNK + place).to(tl.int64)
    key, value = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    inside = token < tokens
    of_head = token * HEADS + head
    of_key = inside[:, None] & (key < KEY)[None, :]
    of_value = inside[:, None] & (value < VALUE)[None, :]
    from_key = (token * (HEADS // GROUP) + head // GROUP)[:, None] * KEY + key[None, :]
    query = tl.load(q + from_key, mask=of_key, other=0.0).to(tl.float32)
    known = tl.load(k + from_key, mask=of_key, other=0.0).to(tl.float32)
    if NORMALISED:
        query, known = unit_vectors(query), unit_vectors(known)
    query *= scale
    weight = tl.load(rate + of_head, mask=inside, other=0.0).to(tl.float32)
    to_head = of_head[:, None] * KEY + key[None, :]
    of_pairs = of_head[:, None] * CHUNK + place[None, :]
    if BY_CHANNEL:
        log_decay = tl.load(decay + to_head, mask=of_key, other=0.0).to(tl.float32)
        since, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        left = whole[None, :] - since
        tl.store(ends + (chunk * HEADS + head) * KEY + key, tl.exp(whole), mask=key < KEY)
    else:
        log_decay = tl.load(decay + of_head, mask=inside, other=0.0).to(tl.float32)
        passed, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        between = tl.exp(tl.where(place[:, None] >= place[None, :], passed[:, None] - passed[None, :], float("-inf")))
        pairs = tl.dot(query, tl.trans(known), input_precision=PRECISION) * between
        tl.store(scores + of_pairs, pairs, mask=inside[:, None])
        since, left = passed[:, None], (whole - passed)[:, None]
        tl.store(ends + chunk * HEADS + head, tl.exp(whole))
    tl.store(reads + to_head, query * tl.exp(since), mask=of_key)
    tl.store(keys + to_head, known * tl.exp(left), mask=of_key)
    of_token = of_head[:, None] * VALUE + value[None, :]
    new = tl.load(v + of_token, mask=of_value, other=0.0).to(tl.float32) * weight[:, None]
    if DELTA:
        if BY_CHANNEL:
            system = tl.load(products + of_pairs, mask=inside[:, None], other=0.0) * weight[:, None]
        else:
            system = tl.dot(known, tl.trans(known), input_precision=PRECISION) * between * weight[:, None]
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        solved = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for i in range(1, CHUNK):  # row i of T needs the rows before it
            row = tl.sum(tl.where(place[:, None] == i, system, 0.0), 0)
            change = tl.sum(row[:, None] * solved, 0)
            solved = tl.where(place[:, None] == i, solved - change[None, :], solved)
        new = tl.dot(solved, new, input_precision=PRECISION)
        told = tl.dot(solved, known * weight[:, None] * tl.exp(since), input_precision=PRECISION)
        tl.store(seen + to_head, told, mask=of_key)
    tl.store(values + of_token, new, mask=of_value)


@triton.jit(do_not_specialize=["tokens"])
def scan_kernel(
    reads, keys, scores, values, seen, ends, before, after, out, tokens,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    BY_VALUE: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK columns of the state of one head through all chunks. BY_VALUE: it is [value, key] in memory."""
    head = tl.program_id(0)
    key, place = tl.arange(0, KEY_DIM), tl.arange(0, CHUNK)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if BY_VALUE:
        at = head * KEY * VALUE + value[None, :] * KEY + key[:, None]
    else:
        at = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    mask = (key < KEY)[:, None] & (value < VALUE)[None, :]
    state = tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
    for chunk in range(tl.cdiv(tokens, CHUNK)):
        token = (chunk * CHUNK + place).to(tl.int64)
        inside = token < tokens
        of_key = inside[:, None] & (key < KEY)[None, :]
        of_value = inside[:, None] & (value < VALUE)[None, :]
        to_head = (token * HEADS + head)[:, None] * KEY + key[None, :]
        of_token = (token * HEADS + head)[:, None] * VALUE + value[None, :]
        new = tl.load(values + of_token, mask=of_value, other=0.0)
        if DELTA:
            told = tl.load(seen + to_head, mask=of_key, other=0.0)
            new -= tl.dot(told, state, input_precision=PRECISION)
        query = tl.load(reads + to_head, mask=of_key, other=0.0)
        pairs = tl.load(
            scores + (token * HEADS + head)[:, None] * CHUNK + place[None, :], mask=inside[:, None], other=0.0
        )
        result = tl.dot(query, state, input_precision=PRECISION)
        result = tl.dot(pairs, new, result, input_precision=PRECISION)
        tl.store(out + of_token, result.to(out.dtype.element_ty), mask=of_value)
        known = tl.load(keys + to_head, mask=of_key, other=0.0)
        if BY_CHANNEL:
            state *= tl.load(ends + (chunk * HEADS + head) * KEY + key, mask=key < KEY, other=0.0)[:, None]
        else:
            state *= tl.load(ends + chunk * HEADS + head)
        state = tl.dot(tl.trans(known), new, state, input_precision=PRECISION)
    tl.store(after + at, state, mask=mask)


class Rule(NamedTuple):
    """How the tokens change the state."""

    is_delta: bool  # the gated delta rule; otherwise values are added as they are
    scale: float  # of queries
    normalised: bool = False  # queries and keys are divided by their lengths
    by_value: bool = False  # the state is [heads, width, key_width]


def run_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor, rule: Rule, precision: str
) -> tuple[Tensor, Tensor]:
    """q, k [tokens, key_heads, key_width], v [tokens, heads, width], decay (its logarithm) and rate [tokens, heads] →
    [tokens, heads, width] of v's dtype, and the state after the last token, float32.

    decay may be one for each channel of the keys, [tokens, heads, key_width]. state: the one before, [heads, key_width,
    width], or [heads, width, key_width] with `by_value`. All arguments are contiguous. precision: of products, which
    Triton calls input_precision.
    """
    (tokens, key_heads, key), (_, heads, value) = k.shape, v.shape
    assert all(each.is_contiguous() for each in (q, k, v, decay, rate, state)) and heads % key_heads == 0
    chunks = triton.cdiv(tokens, CHUNK)
    reads, keys, seen = (empty((tokens, heads, key), dtype=float32, device=q.device) for _ in range(3))
    values, scores = (empty((tokens, heads, width), dtype=float32, device=q.device) for width in (value, CHUNK))
    by_channel = decay.dim() == 3
    ends = empty((chunks, *decay.shape[1:]), dtype=float32, device=q.device)
    out, after = empty_like(v), empty(state.shape, dtype=float32, device=q.device)
    key_dim, value_dim = (max(16, triton.next_power_of_2(width)) for width in (key, value))
    shape = {"HEADS": heads, "KEY": key, "KEY_DIM": key_dim, "VALUE": value, "CHUNK": CHUNK, "DELTA": rule.is_delta}
    shape["BY_CHANNEL"] = by_channel
    products = scores
    if by_channel:
        products = empty_like(scores)
        channel_scores(q, k, decay, scores, products, rule.scale, precision, normalised=rule.normalised)
    chunk_kernel[(chunks, heads)](
        q, k, v, decay, rate, products, reads, keys, scores, values, seen, ends, tokens, rule.scale,
        GROUP=heads // key_heads, VALUE_DIM=value_dim, NORMALISED=rule.normalised, PRECISION=precision, **shape,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    block = min(COLUMNS, value_dim)
    scan_kernel[(heads, triton.cdiv(value, block))](
        reads, keys, scores, values, seen, ends, state, after, out, tokens,
        BLOCK=block, BY_VALUE=rule.by_value, PRECISION=precision, **shape, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, after
