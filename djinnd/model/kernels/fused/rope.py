"""Rotary embedding of a step's queries and keys, both in one launch instead of nine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # elements of each half that one program rotates


@triton.jit(do_not_specialize=["angle"])
def rope_kernel(
    q, k, q_out, k_out, cos, sin,
    q_token, q_head, k_token, k_head, angle_token, angle,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    ANGLES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Rotates HEADS heads of one token. The first programs take heads of q, the others heads of k. ANGLES: of a
    head, HEAD_DIM or half of it. DENSE: a token's angles are contiguous in memory, and `angle` does not count."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    if first < tl.cdiv(Q_HEADS, HEADS) * HEADS:
        x, out, heads = q + token * q_token, q_out + token * Q_HEADS * HEAD_DIM, Q_HEADS
        x_head = q_head
    else:
        first -= tl.cdiv(Q_HEADS, HEADS) * HEADS
        x, out, heads = k + token * k_token, k_out + token * K_HEADS * HEAD_DIM, K_HEADS
        x_head = k_head
    at = tl.arange(0, HALF)
    upper = at + HEAD_DIM // 2
    inside = at < HEAD_DIM // 2
    of_lower, of_upper = at, at + ANGLES - HEAD_DIM // 2  # the angles of both halves
    if not DENSE:
        of_lower, of_upper = of_lower * angle, of_upper * angle
    cos += token * angle_token
    sin += token * angle_token
    head = first + tl.arange(0, HEADS)[:, None]
    mask = (head < heads) & inside[None, :]
    x1 = tl.load(x + head * x_head + at[None, :], mask=mask, other=0.0)
    x2 = tl.load(x + head * x_head + upper[None, :], mask=mask, other=0.0)
    kind = out.dtype.element_ty
    y1 = rotated(
        x1, -x2, tl.load(cos + of_lower, mask=inside, other=0.0), tl.load(sin + of_lower, mask=inside, other=0.0)
    )
    y2 = rotated(
        x2, x1, tl.load(cos + of_upper, mask=inside, other=0.0), tl.load(sin + of_upper, mask=inside, other=0.0)
    )
    tl.store(out + head * HEAD_DIM + at[None, :], y1.to(kind), mask=mask)
    tl.store(out + head * HEAD_DIM + upper[None, :], y2.to(kind), mask=mask)


@triton.jit
def rotated(x, across, cos, sin):
    """x * cos + across * sin, with each product rounded to the angles' dtype, as tensor operations do."""
    kind = cos.dtype
    a = (x.to(tl.float32) * cos.to(tl.float32)[None, :]).to(kind)
    b = (across.to(tl.float32) * sin.to(tl.float32)[None, :]).to(kind)
    return a.to(tl.float32) + b.to(tl.float32)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [1, heads, tokens, head_dim], k [1, kv_heads, tokens, head_dim], cos and sin [1, tokens, angles] → rotated q
    and k of the same shapes. Each token's heads are contiguous in memory. There are head_dim angles, or head_dim / 2.

    The two halves of a head are rotated against each other, by the same angles if there are head_dim / 2. cos and sin
    have q's dtype, or float32, with which only the result is rounded. A head's numbers in q and k are contiguous. The
    other strides are free, and equal for cos and sin.
    """
    assert q.stride(3) == k.stride(3) == 1 and cos.stride() == sin.stride()
    (_, q_heads, tokens, head_dim), k_heads = q.shape, k.shape[1]
    assert cos.shape[2] in (head_dim, head_dim // 2)
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(1, ELEMENTS // half))
    q_out, k_out = (torch.empty((1, tokens, n, head_dim), dtype=q.dtype, device=q.device) for n in (q_heads, k_heads))
    rope_kernel[(tokens, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads))](
        q, k, q_out, k_out, cos, sin,
        q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), cos.stride(2),
        Q_HEADS=q_heads, K_HEADS=k_heads, HEAD_DIM=head_dim, HALF=half, HEADS=heads, ANGLES=cos.shape[2],
        DENSE=cos.stride(2) == 1, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
