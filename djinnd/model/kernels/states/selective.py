"""A step of a selective state space model.

    h ← exp(Δ A) h + Δ x ⊗ B;  y = h C + D x

Mamba (Gu and Dao, 2023, arXiv 2312.00752, equation 2) has one A for each element of the state, and Mamba 2 (Dao and
Gu, 2024, arXiv 2405.21060, section 7) one for each head. A step reads and writes the state h once, and that is nearly
all of its traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from djinnd.model.kernels.states.slots import page_stride, slots_of

ELEMENTS = 4096  # of a state that a program holds: 32 a thread
LINEAR = tl.constexpr(20.0)  # from here on, torch's softplus returns its input


@triton.jit
def softplus(x):
    """log(1 + exp x). Kahan's correction keeps the digits that 1 + exp x loses."""
    e = tl.exp(tl.minimum(x, LINEAR))
    u = 1.0 + e
    y = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > LINEAR, x, y)


@triton.jit
def selective_kernel(
    x, dt, a, b, c, d, z, dt_bias, states, slots, out,
    x_row, x_head, x_width, dt_row, dt_head, dt_width, a_head, a_width, a_state, b_row, b_head, b_state,
    c_row, c_head, c_state, d_head, d_width, z_row, z_head, z_width, bias_head, bias_width, page,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, ONE_A: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Updates BLOCK rows of the state of one head of one row of the batch."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, STATE_DIM)
    of_width, of_state = width < WIDTH, place < STATE
    mask = of_width[:, None] & of_state[None, :]
    follows, source, target = slots_of(slots, row, page)
    at = head * WIDTH * STATE + width[:, None] * STATE + place[None, :]
    state = tl.load(states + source + at, mask=mask & follows, other=0.0).to(tl.float32)
    new = tl.load(x + row * x_row + head * x_head + width * x_width, mask=of_width, other=0.0).to(tl.float32)
    step = tl.load(dt + row * dt_row + head * dt_head + width * dt_width, mask=of_width, other=0.0).to(tl.float32)
    into = tl.load(b + row * b_row + head // GROUP * b_head + place * b_state, mask=of_state, other=0.0)
    back = tl.load(c + row * c_row + head // GROUP * c_head + place * c_state, mask=of_state, other=0.0)
    if BIAS:
        step += tl.load(dt_bias + head * bias_head + width * bias_width, mask=of_width, other=0.0).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    if ONE_A:
        state *= tl.exp(step * tl.load(a + head * a_head).to(tl.float32))[:, None]
    else:
        rates = tl.load(a + head * a_head + width[:, None] * a_width + place[None, :] * a_state, mask=mask, other=0.0)
        state *= tl.exp(step[:, None] * rates.to(tl.float32))
    state += (step * new)[:, None] * into.to(tl.float32)[None, :]
    y = tl.sum(state * back.to(tl.float32)[None, :], 1)
    tl.store(states + target + at, state.to(states.dtype.element_ty), mask=mask)
    if SKIP:
        y += new * tl.load(d + head * d_head + width * d_width, mask=of_width, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(z + row * z_row + head * z_head + width * z_width, mask=of_width, other=0.0).to(tl.float32)
        y *= gate / (1.0 + tl.exp(-gate))
    tl.store(out + (row * HEADS + head) * WIDTH + width, y.to(out.dtype.element_ty), mask=of_width)


def selective_step(
    states: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    softplus_of_dt: bool,
    z: Tensor | None,
) -> Tensor:
    """Mamba 2: x, dt, z [rows, heads, width], a [heads, width, state], b, c [rows, groups, state], d, dt_bias [heads,
    width], states [pages, heads, width, state] → [rows, heads, width] of x's dtype. Consecutive heads share a group.
    Mamba: without heads and groups, as one of each.

    Computes in float32. All strides are free; of an expanded tensor they are 0. y is multiplied by silu(z).
    """
    if x.dim() == 2:
        x, dt, b, c = (each.unsqueeze(1) for each in (x, dt, b, c))
        d, dt_bias = (None if each is None else each.unsqueeze(0) for each in (d, dt_bias))
        z, states = None if z is None else z.unsqueeze(1), states.unsqueeze(1)
        return selective_step(states, slots, x, dt, a.unsqueeze(0), b, c, d, dt_bias, softplus_of_dt, z).squeeze(1)
    (rows, heads, width), (groups, state) = x.shape, b.shape[1:]
    assert a.shape == states.shape[1:] == (heads, width, state) and dt.shape == x.shape and b.shape == c.shape
    assert heads % groups == 0
    state_dim = triton.next_power_of_2(state)
    block = min(triton.next_power_of_2(width), max(1, ELEMENTS // state_dim))
    out = empty((rows, heads, width), dtype=x.dtype, device=x.device)
    selective_kernel[(rows, heads, triton.cdiv(width, block))](
        x, dt, a, b, c, d, z, dt_bias, states, slots, out,
        *x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride(), *_strides(d, 2), *_strides(z, 3),
        *_strides(dt_bias, 2), page_stride(states, slots),
        HEADS=heads, GROUP=heads // groups, WIDTH=width, STATE=state, STATE_DIM=state_dim, BLOCK=block,
        ONE_A=a.stride(1) == a.stride(2) == 0, SOFTPLUS=softplus_of_dt, BIAS=dt_bias is not None, SKIP=d is not None,
        GATED=z is not None, num_warps=4,
    )  # fmt: skip
    return out


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()
