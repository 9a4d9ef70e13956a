"""A step of the gated delta rule, with a decay for each head or for each channel of the keys.

    S ← decay S;  S ← S + k ⊗ beta (v - kᵀ S);  o = qᵀ S

One decay a head: Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464, equation 10), in Qwen3-Next and
Qwen3.5. One a channel: Kimi Delta Attention (Kimi Linear, 2025, arXiv 2510.26692, equation 1). A step reads and writes
the state S once, and that is nearly all of its traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from djinnd.model.kernels.states.slots import page_stride, slots_of
from djinnd.model.kernels.states.vectors import EPS

ELEMENTS = 4096  # of a state that a program holds: 32 a thread


@triton.jit
def delta_kernel(
    q, k, v, decay, beta, states, slots, out,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head, page, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, NORMALISED: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Updates BLOCK columns of the state of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, KEY_DIM)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    of_key, of_value = key < KEY, value < VALUE
    follows, source, target = slots_of(slots, row, page)
    at = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    mask = of_key[:, None] & of_value[None, :]
    state = tl.load(states + source + at, mask=mask & follows, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_row + head // GROUP * q_head + key, mask=of_key, other=0.0).to(tl.float32)
    keys = tl.load(k + row * k_row + head // GROUP * k_head + key, mask=of_key, other=0.0).to(tl.float32)
    new = tl.load(v + row * v_row + head * v_head + value, mask=of_value, other=0.0).to(tl.float32)
    rate = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    if NORMALISED:
        query = query / tl.sqrt(tl.sum(query * query, 0) + EPS)
        keys = keys / tl.sqrt(tl.sum(keys * keys, 0) + EPS)
    decay += row * decay_row + head * decay_head
    if BY_CHANNEL:
        state *= tl.exp(tl.load(decay + key, mask=of_key, other=0.0).to(tl.float32))[:, None]
    else:
        state *= tl.exp(tl.load(decay).to(tl.float32))
    told = tl.sum(state * keys[:, None], 0)
    state += keys[:, None] * ((new - told) * rate)[None, :]
    result = tl.sum(state * (query * scale)[:, None], 0)
    tl.store(states + target + at, state.to(states.dtype.element_ty), mask=mask)
    tl.store(out + (row * HEADS + head) * VALUE + value, result.to(out.dtype.element_ty), mask=of_value)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, slots: Tensor, normalised: bool
) -> Tensor:
    """q, k [rows, 1, key_heads, key_width], v [rows, 1, heads, width] → [rows, 1, heads, width] of q's dtype.

    Consecutive heads share a key head. decay: its logarithm, [rows, 1, heads] or, for each channel of the keys, [rows,
    1, heads, key_width]; beta: [rows, 1, heads]; states: [pages, heads, key_width, width]. normalised: queries and keys
    are divided by their lengths. Computes in float32. Widths have stride 1; the other strides are free.
    """
    (rows, tokens, key_heads, key), (heads, value) = k.shape, v.shape[2:]
    by_channel = decay.dim() == 4
    assert tokens == 1 and heads % key_heads == 0 and q.shape == k.shape
    assert states.shape[1:] == (heads, key, value) and decay.shape[3:] == (key,) * by_channel
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1 and (not by_channel or decay.stride(3) == 1)
    key_dim = triton.next_power_of_2(key)
    block = min(triton.next_power_of_2(value), max(16, ELEMENTS // key_dim))
    out = empty((rows, 1, heads, value), dtype=q.dtype, device=q.device)
    delta_kernel[(rows, heads, triton.cdiv(value, block))](
        q, k, v, decay, beta, states, slots, out,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        decay.stride(0), decay.stride(2), beta.stride(0), beta.stride(2), page_stride(states, slots), key**-0.5,
        HEADS=heads, GROUP=heads // key_heads, KEY=key, KEY_DIM=key_dim, VALUE=value, BLOCK=block,
        NORMALISED=normalised, BY_CHANNEL=by_channel, num_warps=4,
    )  # fmt: skip
    return out
