"""Log probabilities of chosen tokens and of the likeliest ones, from raw logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """`own` float32 [rows], `top` int64 [rows, n] and their `values` float32 [rows, n], all on the logits' device."""

    own: Tensor
    top: Tensor
    values: Tensor


def token_logprobs(logits: Tensor, picked: Tensor, likeliest: int) -> TokenLogprobs:
    """Log probabilities of the tokens `picked` (int64 [rows]) and of the `likeliest` most probable tokens of each row.

    logits: [rows, vocab], any float dtype. The likeliest token comes first; of equal ones, the lowest index.
    """
    raw = logits.float()
    total = raw.logsumexp(dim=-1, keepdim=True)
    top = _order(raw).topk(likeliest).indices if likeliest else picked.new_empty(len(picked), 0)
    own, values = (_finite(raw.gather(1, at) - total) for at in (picked[:, None], top))
    return TokenLogprobs(own[:, 0], top, values)


def _finite(logprobs: Tensor) -> Tensor:
    """Replaces -inf and NaN by the lowest float32, since JSON has neither. A token that the model rules out has -inf;
    all tokens of a row with NaN or +inf among its logits have NaN."""
    lowest = torch.finfo(torch.float32).min
    return logprobs.nan_to_num_(nan=lowest, neginf=lowest)


def _order(values: Tensor) -> Tensor:
    """float32 [rows, n] → int64 [rows, n], all different within a row, in the order of (value, -index). `topk` does not
    define which of equal values it takes, and in bf16 many values are equal."""
    bits = values.view(torch.int32)
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)  # a negative float's bits grow as its value falls
    return ordered.long().mul_(1 << 32).sub_(torch.arange(values.shape[1], device=values.device))
