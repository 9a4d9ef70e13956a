"""The picks of a router and their weights, from its logits, in one launch.

    softmax of picks    a softmax of the picked logits, as gpt-oss has it
    softmax             a softmax of all logits, as Mixtral and Qwen have it
    sigmoid             the sigmoid of each logit, as DeepSeek-V3 has it

A row picks the experts with the largest keys, the largest first. A key is a logit, or its score plus a correction of
the expert. Both scores grow with the logit, so without a correction the picks are also those with the largest scores.
Of equal keys the lower expert comes first; torch.topk leaves that open. NaN counts as larger than all numbers, as in
torch. Picks are always different experts, whatever the logits are.

`keys_of` and `weights_of` are the same in PyTorch, for trials of a family's own router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.kernels.coded.numbers import rounded
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.launches import launches

SOFTMAX_OF_PICKS, SOFTMAX, SIGMOID = (tl.constexpr(number) for number in range(3))
NAN, TAKEN = tl.constexpr(0x7FFF_FFFF), tl.constexpr(-0x8000_0000)  # above and below the places of all numbers


@dataclass(frozen=True, slots=True)
class Weighting:
    """How picks and weights follow from logits. All of it is in float32, and the weights are rounded at the end.

    scores: one of the numbers above. is_corrected: a score plus a correction decides on the picks, and not on their
    weights. is_normalised: the scores of a row's picks are divided by their sum plus `epsilon`. factor: of all weights.
    """

    scores: int
    is_corrected: bool = False
    is_normalised: bool = False
    epsilon: float = 0.0
    factor: float = 1.0


@triton.jit
def places_of(keys):
    """float32 → int32 in the same order. -0 is equal to 0, and every NaN is larger than all numbers."""
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)
    place = tl.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    return tl.where(keys == keys, place, NAN)


@triton.jit
def scores_of(logits, largest, total, SCORES: tl.constexpr):
    """largest, total: of the softmax's logits, and the sum of their exponentials. -inf becomes 0."""
    if SCORES == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        return tl.exp(logits - largest) / total


@triton.jit
def route_kernel(
    logits, correction, picked, weights, epsilon, factor,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PICKS: tl.constexpr, PLACES: tl.constexpr, SCORES: tl.constexpr,
    CORRECTED: tl.constexpr, NORMALISED: tl.constexpr, PLAINLY: tl.constexpr,
):  # fmt: skip
    """A program routes one row. WIDTH, PLACES: EXPERTS and PICKS, each rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    each, pick = tl.arange(0, WIDTH), tl.arange(0, PLACES)
    logits += row * EXPERTS
    own = tl.load(logits + each, mask=each < EXPERTS, other=float("-inf")).to(tl.float32)
    largest, total = 0.0, 1.0
    if SCORES == SOFTMAX:
        largest = tl.max(own, 0)
        total = tl.sum(tl.exp(own - largest), 0)
    keys = own
    if CORRECTED:
        added = tl.load(correction + each, mask=each < EXPERTS, other=0.0).to(tl.float32)
        keys = scores_of(own, largest, total, SCORES) + added
    # An integer's largest in a warp takes one instruction. Experts that do not exist are taken from the start.
    place = tl.where(each < EXPERTS, places_of(keys), TAKEN)
    found = tl.zeros([PLACES], tl.int32)
    for number in range(PICKS):
        expert = tl.min(tl.where(place == tl.max(place, 0), each, WIDTH), 0)
        found = tl.where(pick == number, expert, found)
        place = tl.where(each == expert, TAKEN, place)
    there = pick < PICKS
    chosen = tl.load(logits + found, mask=there, other=float("-inf")).to(tl.float32)
    if SCORES == SOFTMAX_OF_PICKS:
        largest = tl.max(chosen, 0)
        total = tl.sum(tl.exp(chosen - largest), 0)
    weight = scores_of(chosen, largest, total, SCORES)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 0) + epsilon)
    weight = rounded(weight * factor, weights.dtype.element_ty, PLAINLY)
    tl.store(picked + row * PICKS + pick, found.to(tl.int64), mask=there)
    tl.store(weights + row * PICKS + pick, weight, mask=there)


def route(
    logits: Tensor, correction: Tensor | None, picks: int, weighting: Weighting, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """→ picks, int64 [rows, picks], and their weights, of `dtype` [rows, picks].

    logits: [rows, experts], of any float type. correction: [experts], if the weighting has one.
    """
    rows, experts = logits.shape
    assert 0 < picks <= experts and weighting.is_corrected == (correction is not None)
    logits = logits.contiguous()
    # A rehearsal may skip the launch, and later kernels take the picks for indices.
    empty = torch.zeros if launches.is_listing else torch.empty
    picked = empty(rows, picks, dtype=torch.int64, device=logits.device)
    weights = empty(rows, picks, dtype=dtype, device=logits.device)
    route_kernel[(rows,)](
        logits, logits if correction is None else correction.contiguous(), picked, weights,
        weighting.epsilon, weighting.factor,
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), PICKS=picks, PLACES=triton.next_power_of_2(picks),
        SCORES=weighting.scores, CORRECTED=weighting.is_corrected, NORMALISED=weighting.is_normalised,
        PLAINLY=INTERPRETED, num_warps=1,
    )  # fmt: skip
    return picked, weights


def keys_of(weighting: Weighting, logits: Tensor, correction: Tensor | None) -> Tensor:
    """→ float32 [rows, experts]. Without a correction they are scores, which may be equal where logits are not."""
    wide = logits.float()
    if weighting.scores == SOFTMAX_OF_PICKS.value:
        return wide
    scores = wide.sigmoid() if weighting.scores == SIGMOID.value else wide.softmax(-1)
    return scores if correction is None else scores + correction


def weights_of(weighting: Weighting, logits: Tensor, picked: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of these picks, in the order of the picks."""
    if weighting.scores == SOFTMAX_OF_PICKS.value:
        weights = logits.gather(1, picked).float().softmax(-1)
    else:
        weights = keys_of(weighting, logits, None).gather(1, picked)
    if weighting.is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + weighting.epsilon)
    return (weights * weighting.factor).to(dtype)
