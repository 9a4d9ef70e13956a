"""Gemma 3n: alternating updates (AltUp; Baykal and others, 2023) keep several hidden states of each token.

The family's blocks take and return them as [states, 1, tokens, width]. djinnd's steps, points and graphs carry
[1, tokens, width]: here a row has all states of a token, one behind the other. A block unfolds its input, and so does a
block's stand-in (family/adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def fold(hidden: Tensor) -> Tensor:
    """[states, 1, tokens, width] → [1, tokens, states x width]."""
    return hidden.permute(1, 2, 0, 3).flatten(2)


def unfold(hidden: Tensor, states: int) -> Tensor:
    """[1, tokens, states x width] → [states, 1, tokens, width]."""
    return hidden.unflatten(2, (states, -1)).permute(2, 0, 1, 3)


def adapt(blocks: Iterable[nn.Module]) -> None:
    for each in blocks:
        block: Any = each
        block.hidden_states = block.config.altup_num_inputs
        block.forward = _folding(block.forward, block.hidden_states)
        if block.mlp.activation_sparsity > 0:
            block.mlp._gaussian_topk = Sparsity(block.mlp.activation_sparsity)


def _folding(forward: Callable[..., Tensor], states: int) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return fold(forward(unfold(hidden, states), *args, **kwargs))

    return run


class Sparsity:
    """Keeps the largest values of each row, as the family's own method does. That method copies a number to the device
    in each call, which no CUDA graph can hold."""

    def __init__(self, sparsity: float) -> None:
        normal = torch.distributions.normal.Normal(0, 1)
        self._deviations = normal.icdf(torch.tensor(sparsity, dtype=torch.float32, device="cpu"))

    def __call__(self, inputs: Tensor) -> Tensor:
        deviations = self._deviations.to(inputs.dtype).item()  # rounded as the family rounds it
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        deviation = torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
        return functional.relu(inputs - (mean + deviation * deviations))
