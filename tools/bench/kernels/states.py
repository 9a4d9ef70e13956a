"""Measurements of single tokens through modules with a state: each state is read and written once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from djinnd.model.kernels.states.delta_rule import delta_step
from djinnd.model.kernels.states.selective import selective_step
from djinnd.model.kernels.states.short_convolution import convolve
from tools.bench.kernels.timing import CHOSEN, COLD, DTYPE, Case, Measured

ROWS = (1, 4, 16, 64, 256)
CONV, DELTA, KDA, MAMBA_2 = (8192, 4), (16, 32, 128), (32, 32, 128), (128, 8, 64, 128)

Launch = Callable[[Tensor, Tensor], object]  # states, slots


def measure_states(ceiling: float) -> Iterator[Measured | None]:
    """Counts the bytes of the states, read and written. The ceiling is the rate of a copy."""
    for rows in ROWS:
        yield _measure("convolution, 8,192 channels", CONV, DTYPE, rows, _convolution(rows), ceiling)
        yield _measure("Qwen3.5, 32 heads", (32, 128, 128), torch.float32, rows, _delta(rows, *DELTA), ceiling)
        yield _measure("Kimi Linear, 32 heads", (32, 128, 128), torch.float32, rows, _delta(rows, *KDA, True), ceiling)
        yield _measure(
            "Nemotron-H, 128 heads", (128, 64, 128), torch.float32, rows, _selective(rows, *MAMBA_2), ceiling
        )


def _measure(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int, launch: Launch, ceiling: float
) -> Measured | None:
    """Every launch has other pages, so many that no large state is in the cache when its turn comes again."""
    work = 2 * rows * math.prod(shape) * dtype.itemsize
    launches = min(512, max(1, math.ceil(COLD / work)))
    pages = torch.randperm(rows * launches, device="cuda", dtype=torch.int32).view(launches, rows, 1).expand(-1, -1, 2)
    states = torch.zeros(rows * launches, *shape, dtype=dtype, device="cuda")
    case = Case("states", f"{name}, {rows} rows", work, "GB/s", ceiling)
    return case.measure(CHOSEN, [partial(launch, states, slots.contiguous()) for slots in pages])


def _convolution(rows: int) -> Launch:
    channels, width = CONV
    x, weight = _random(rows, channels, 1), _random(channels, width)
    return lambda states, slots: convolve(x, states, slots, weight, None, "silu")


def _delta(rows: int, key_heads: int, heads: int, width: int, by_channel: bool = False) -> Launch:
    q, k, v = (_random(rows, 1, n, width) for n in (key_heads, key_heads, heads))
    decay = -_random(rows, 1, heads, *([width] if by_channel else [])).float().abs()
    beta = _random(rows, 1, heads).sigmoid()
    return lambda states, slots: delta_step(q, k, v, decay, beta, states, slots, True)


def _selective(rows: int, heads: int, groups: int, width: int, state: int) -> Launch:
    x, dt, b = _random(rows, heads, width), _random(rows, heads, 1).expand(-1, -1, width), _random(rows, groups, state)
    a = -torch.ones(heads, 1, 1, device="cuda").expand(-1, width, state)
    d = _random(heads, 1).expand(-1, width)
    return lambda states, slots: selective_step(states, slots, x, dt, a, b, b, d, d, True, None)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")
