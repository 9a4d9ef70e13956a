"""Products of queries and keys within a chunk, if each channel of the keys decays by itself (Kimi Delta Attention).

    scores_ij = Σ_d q_id k_jd exp(b_id - b_jd)   for j ≤ i      and the same with k_i in the place of q_i

b is the sum of logarithmic decays from the start of the chunk. With one decay a head, the exponential is a factor of
the product. With one a channel it is inside of the sum, and exp(b_i) and exp(-b_j) apart overflow. So a program takes a
strip of 16 tokens. For j before the strip, both are measured from the strip's start, where neither is above 1. Within
the strip there is no such point for all pairs, and the sum is computed pair by pair. As in flash-linear-attention
(Yang and Zhang, 2024) and Kimi Linear (2025, arXiv 2510.26692, section 3).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.states.vectors import unit_vectors

STRIP = 16  # tokens


@triton.jit(do_not_specialize=["tokens"])
def channel_scores_kernel(
    q, k, decay, scores, system, tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, NORMALISED: tl.constexpr,
    CHUNK: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip of one head. Places of `scores` and `system` with j behind i become 0."""
    strip, head = tl.program_id(0), tl.program_id(1)
    first = strip * STRIP % CHUNK  # of the strip, in its chunk
    place, own, key = tl.arange(0, CHUNK), tl.arange(0, STRIP), tl.arange(0, KEY_DIM)
    token = (strip * STRIP - first + place).to(tl.int64)
    row = (strip * STRIP + own).to(tl.int64)
    of_key, there = (token < tokens)[:, None] & (key < KEY)[None, :], (row < tokens)[:, None] & (key < KEY)[None, :]
    from_key = (token * (HEADS // GROUP) + head // GROUP)[:, None] * KEY + key[None, :]
    from_row = (row * (HEADS // GROUP) + head // GROUP)[:, None] * KEY + key[None, :]
    known = tl.load(k + from_key, mask=of_key, other=0.0).to(tl.float32)
    query = tl.load(q + from_row, mask=there, other=0.0).to(tl.float32)
    mine = tl.load(k + from_row, mask=there, other=0.0).to(tl.float32)
    if NORMALISED:
        known, query, mine = unit_vectors(known), unit_vectors(query), unit_vectors(mine)
    query *= scale
    of_token, of_own = (token * HEADS + head)[:, None] * KEY, (row * HEADS + head)[:, None] * KEY
    logs = tl.load(decay + of_token + key[None, :], mask=of_key, other=0.0).to(tl.float32)
    before = tl.sum(tl.where((place < first)[:, None], logs, 0.0), 0)
    left = tl.minimum(before[None, :] - tl.cumsum(logs, 0), 0.0)  # from j to the start of the strip
    known = tl.where((place < first)[:, None], known * tl.exp(left), 0.0)
    passed = tl.cumsum(tl.load(decay + of_own + key[None, :], mask=there, other=0.0).to(tl.float32), 0)
    since = tl.exp(passed)
    pairs = tl.dot(query * since, tl.trans(known), input_precision=PRECISION)
    told = tl.dot(mine * since, tl.trans(known), input_precision=PRECISION)
    for j in range(STRIP):
        is_j = (own == j)[:, None]
        reached = tl.exp(tl.minimum(passed - tl.sum(tl.where(is_j, passed, 0.0), 0)[None, :], 0.0))
        reached *= tl.sum(tl.where(is_j, mine, 0.0), 0)[None, :]
        at = (place == first + j)[None, :] & (own >= j)[:, None]
        pairs = tl.where(at, tl.sum(query * reached, 1)[:, None], pairs)
        told = tl.where(at, tl.sum(mine * reached, 1)[:, None], told)
    out = (row * HEADS + head)[:, None] * CHUNK + place[None, :]
    tl.store(scores + out, pairs, mask=(row < tokens)[:, None])
    tl.store(system + out, told, mask=(row < tokens)[:, None])


def channel_scores(
    q: Tensor,
    k: Tensor,
    decay: Tensor,
    scores: Tensor,
    system: Tensor,
    scale: float,
    precision: str,
    *,
    normalised: bool,
) -> None:
    """q, k [tokens, key_heads, key_width], decay (its logarithm) [tokens, heads, key_width] → scores and system,
    float32 [tokens, heads, chunk]: for each token, the products with the tokens of its chunk."""
    (tokens, key_heads, key), heads, chunk = k.shape, decay.shape[1], scores.shape[2]
    channel_scores_kernel[(triton.cdiv(tokens, STRIP), heads)](
        q, k, decay, scores, system, tokens, scale,
        HEADS=heads, GROUP=heads // key_heads, KEY=key, KEY_DIM=max(16, triton.next_power_of_2(key)),
        NORMALISED=normalised, CHUNK=chunk, STRIP=STRIP, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
