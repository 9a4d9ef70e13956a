"""Measurements of routers: the kernel beside the operations of the families behind their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from djinnd.model.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_PICKS, Weighting, route
from tools.bench.kernels.timing import CHOSEN, DTYPE, Case, Measured

ROWS = (1, 4, 16, 64, 256, 2048)
LAUNCHES = 32  # as many as a model has blocks


def of_picks(logits: Tensor, correction: None, picks: int) -> tuple[Tensor, Tensor]:
    """gpt-oss: a softmax of the picked logits."""
    values, picked = logits.topk(picks, dim=-1)
    return picked, values.softmax(1)


def normalised(logits: Tensor, correction: None, picks: int) -> tuple[Tensor, Tensor]:
    """Qwen3: a softmax of all logits, divided by the sum of the picks."""
    weights, picked = logits.softmax(-1, dtype=torch.float32).topk(picks, dim=-1)
    weights /= weights.sum(-1, keepdim=True)
    return picked, weights.to(logits.dtype)


def corrected(logits: Tensor, correction: Tensor, picks: int) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3 without groups: sigmoids, and picks by their sums with a correction."""
    scores = logits.sigmoid()
    picked = (scores + correction).topk(picks, dim=-1, sorted=False).indices
    weights = scores.gather(1, picked)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return picked, weights * 2.5


Family = tuple[str, int, int, Weighting, torch.dtype, Callable[..., object]]  # name, experts, picks, …, in torch

FAMILIES: tuple[Family, ...] = (
    ("gpt-oss-20b", 32, 4, Weighting(SOFTMAX_OF_PICKS.value), DTYPE, of_picks),
    ("Qwen3-30B-A3B", 128, 8, Weighting(SOFTMAX.value, is_normalised=True), DTYPE, normalised),
    ("GLM-4.5-Air", 128, 8, Weighting(SIGMOID.value, True, True, 1e-20, 2.5), torch.float32, corrected),
)


def measure_routing(ceiling: float) -> Iterator[Measured | None]:
    """Counts the bytes of logits, picks and weights. They are few, so a launch takes as long as its latency."""
    for name, experts, picks, weighting, dtype, family in FAMILIES:
        correction = torch.randn(experts, device="cuda") if weighting.is_corrected else None
        for rows in ROWS:
            logits = [torch.randn(rows, experts, device="cuda").to(dtype) for _ in range(LAUNCHES)]
            work = rows * (experts * dtype.itemsize + picks * (8 + dtype.itemsize))
            case = Case("routing", f"{name}, {rows} rows", work, "GB/s", ceiling)
            own = [partial(route, each, correction, picks, weighting, dtype) for each in logits]
            yield case.measure(CHOSEN, own)
            yield case.measure("torch", [partial(family, each, correction, picks) for each in logits])
