"""Routing as float64 has it, and logits for it. Tensors are made on torch's default device."""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.model.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_PICKS, Weighting, route

WEIGHTINGS = [
    Weighting(SOFTMAX_OF_PICKS.value),
    Weighting(SOFTMAX.value),
    Weighting(SOFTMAX.value, is_normalised=True),
    Weighting(SIGMOID.value, is_normalised=True),
    Weighting(SIGMOID.value, is_corrected=True, is_normalised=True, epsilon=1e-20, factor=2.5),
    Weighting(SOFTMAX.value, is_corrected=True, factor=16.0),
]


def random_logits(rows: int, experts: int, dtype: torch.dtype) -> Tensor:
    """In 16 bits and with many experts, some of a row are equal."""
    return (2 * torch.randn(rows, experts)).to(dtype)


def correction_of(weighting: Weighting, experts: int) -> Tensor | None:
    return torch.randn(experts) / 2 if weighting.is_corrected else None


def scores_of(weighting: Weighting, logits: Tensor) -> Tensor:
    return logits.sigmoid() if weighting.scores == SIGMOID.value else logits.softmax(-1)


def check_routing(logits: Tensor, picks: int, weighting: Weighting, dtype: torch.dtype) -> None:
    """dtype: of the weights."""
    correction = correction_of(weighting, logits.shape[1])
    picked, weights = route(logits, correction, picks, weighting, dtype)
    assert picked.dtype == torch.int64 and weights.dtype == dtype
    assert picked.shape == weights.shape == (len(logits), picks)
    wide = logits.double()
    if correction is None:
        assert torch.equal(picked, wide.sort(stable=True, descending=True).indices[:, :picks])
    else:  # the kernel's float32 may swap keys that are nearly equal
        assert all(len(set(row)) == picks for row in picked.tolist())
        keys = scores_of(weighting, wide) + correction.double()
        torch.testing.assert_close(keys.gather(1, picked), keys.topk(picks).values, rtol=0, atol=1e-6)
    if weighting.scores == SOFTMAX_OF_PICKS.value:
        wanted = wide.gather(1, picked).softmax(-1)
    else:
        wanted = scores_of(weighting, wide).gather(1, picked)
    if weighting.is_normalised:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    tolerance = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(weights.double(), wanted * weighting.factor, rtol=tolerance, atol=tolerance * 1e-2)
