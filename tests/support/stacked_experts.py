"""Stacked experts with random weights, and what transformers' own products make of them.

Tensors are made on torch's default device, as in tests/support/coded.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.model.kernels.experts.forward import ExpertTiles, experts_forward, pairs_of_tile
from djinnd.model.kernels.experts.gating import CLAMPED, GELU_TANH, RELU_SQUARED, SILU, Activation, reference
from djinnd.model.kernels.experts.matrices import Matrices, coded_matrices, plain_matrices
from djinnd.weights.forms.coding import Coding
from tests.support.coded import decoded, random_parts

SILU_HALVES = Activation(SILU.value)
ACTIVATIONS = [
    SILU_HALVES,
    Activation(GELU_TANH.value, is_interleaved=True),
    Activation(CLAMPED.value, is_interleaved=True, alpha=1.702, limit=1.5),
    Activation(RELU_SQUARED.value),
]
PICKS = 3


def wanted_of(
    x: Tensor, picked: Tensor, weights: Tensor, first: Tensor, second: Tensor, biases: tuple[Tensor, Tensor] | None,
    activation: Activation,
) -> Tensor:  # fmt: skip
    """In float64 but for the roundings between operations. first, second: [experts, out, in]."""
    dtype, (rows, picks) = x.dtype, picked.shape
    out = torch.zeros(rows, second.shape[1], dtype=torch.float64)
    for row in range(rows):
        for pick in range(picks):
            expert = int(picked[row, pick])
            if not 0 <= expert < len(first):
                continue
            both = first[expert].double() @ x[row].double() + (0 if biases is None else biases[0][expert].double())
            between = reference(activation, both.to(dtype).double()).to(dtype).double()
            y = second[expert].double() @ between + (0 if biases is None else biases[1][expert].double())
            out[row] += y.to(dtype).double() * weights[row, pick].double()
    return out


def random_call(rows: int, experts: int, hidden: int, dtype: torch.dtype, picks: int = PICKS) -> tuple[Tensor, ...]:
    """x, distinct picks, and their weights."""
    x = torch.randn(rows, hidden).to(dtype)
    picked = torch.stack([torch.randperm(experts)[:picks] for _ in range(rows)])
    return x, picked, torch.rand(rows, picks).softmax(-1).to(dtype)


def agree(got: Tensor, wanted: Tensor) -> bool:
    """Whether they agree to a few roundings of their numbers and of the numbers between. Torch's own products, summed
    in another order, differ by up to 8 of them where scales differ much, as in random blocks of GGUF."""
    eps, few = torch.finfo(got.dtype).eps, 60 if got.dtype is torch.float32 else 12  # sums are in float32
    return bool(((got.double() - wanted).abs() <= few * eps * (wanted.abs() + wanted.abs().mean())).all())


def check_plain(
    rows: int,
    shape: tuple[int, int, int],
    activation: Activation,
    dtype: torch.dtype,
    *,
    is_transposed: bool = False,
    has_bias: bool = False,
    tiles: tuple[ExpertTiles, ExpertTiles] | None = None,
) -> None:
    """shape: experts, hidden, width."""
    experts, hidden, width = shape
    height = 2 * width if activation.is_gated else width
    first = (torch.randn(experts, height, hidden) / hidden**0.5).to(dtype)
    second = (torch.randn(experts, hidden, width) / width**0.5).to(dtype)
    biases = (torch.randn(experts, height).to(dtype), torch.randn(experts, hidden).to(dtype)) if has_bias else None
    x, picked, weights = random_call(rows, experts, hidden, dtype)
    stored = [each.transpose(1, 2).contiguous() if is_transposed else each for each in (first, second)]
    matrices = [
        plain_matrices(each, None if biases is None else biases[number], is_transposed=is_transposed)
        for number, each in enumerate(stored)
    ]
    got = experts_forward(x, picked, weights, matrices[0], matrices[1], activation, tiles=tiles)
    assert agree(got, wanted_of(x, picked, weights, first, second, biases, activation))


def check_coded(
    rows: int,
    shape: tuple[int, int, int],
    coding: Coding,
    dtype: torch.dtype,
    tiles: tuple[ExpertTiles, ExpertTiles] | None = None,
) -> None:
    """shape: experts, hidden, width."""
    experts, hidden, width = shape
    found: list[Matrices] = []
    plain: list[Tensor] = []
    for height, cols in ((2 * width, hidden), (hidden, width)):
        parts = random_parts(coding, height, cols, experts)
        matrices = coded_matrices(coding, parts, height, cols)
        assert matrices is not None
        found.append(matrices)
        # Tensor cores multiply by weights in x's dtype, one pair by those in float32.
        is_single = pairs_of_tile(rows, PICKS, experts) == 1
        wide = torch.empty(experts, height, cols, dtype=torch.float32 if is_single else dtype)
        plain.append(decoded(coding, parts, wide))
    x, picked, weights = random_call(rows, experts, hidden, dtype)
    got = experts_forward(x / 64, picked, weights, found[0], found[1], SILU_HALVES, tiles=tiles)
    assert agree(got, wanted_of(x / 64, picked, weights, plain[0], plain[1], None, SILU_HALVES))
