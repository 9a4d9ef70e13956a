"""A step of a short causal convolution: a window of each channel's last inputs moves on by one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from djinnd.model.kernels.states.slots import page_stride, slots_of

BLOCK = 256  # channels of a program
ACTIVATIONS = (None, "silu", "swish")


@triton.jit
def convolve_kernel(
    x, window, slots, weight, bias, out, x_row, x_channel, page, weight_channel,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves the windows of BLOCK channels of one row, and sums their last TAPS inputs.

    The thread that loads an input of a window stores it one place earlier, after it has loaded what was there. So the
    window may be moved where it is.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    follows, source, target = slots_of(slots, row, page)
    before = window + source + channel * WIDTH
    after = window + target + channel * WIDTH
    weight += channel * weight_channel
    new = tl.load(x + row * x_row + channel * x_channel, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(weight + (TAPS - 1), mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH):
        earlier = tl.load(before + i, mask=inside & follows, other=0.0)
        if i >= WIDTH + 1 - TAPS:
            tap = tl.load(weight + (i - (WIDTH + 1 - TAPS)), mask=inside, other=0.0)
            total += earlier.to(tl.float32) * tap.to(tl.float32)
        if i > 0:
            tl.store(after + (i - 1), earlier, mask=inside)
    tl.store(after + (WIDTH - 1), new.to(window.dtype.element_ty), mask=inside)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)


def convolve(
    x: Tensor, window: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """x [rows, channels, 1] → [rows, channels, 1] of its dtype: `activation` of the sum of each channel's last inputs.

    window: [pages, channels, width], the last `width` inputs, and `x` behind them afterwards. weight: [channels, taps],
    at most one tap more than the window is wide; bias: [channels]. activation: one of ACTIVATIONS. Sums are float32.
    """
    (rows, channels, _), width, taps = x.shape, window.shape[2], weight.shape[1]
    assert weight.stride(1) == 1 and taps <= width + 1 and activation in ACTIVATIONS
    out = empty((rows, channels, 1), dtype=x.dtype, device=x.device)
    convolve_kernel[(rows, triton.cdiv(channels, BLOCK))](
        x, window, slots, weight, bias, out,
        x.stride(0), x.stride(1), page_stride(window, slots), weight.stride(0),
        CHANNELS=channels, WIDTH=width, TAPS=taps, BIAS=bias is not None, SILU=activation is not None, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out
