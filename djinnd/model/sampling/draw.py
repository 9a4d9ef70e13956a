"""Draw: chooses tokens for rows that need more than an argmax: biases, penalties, temperature, top-k, top-p, min-p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from djinn_client.protocol import Sampling
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.model.copies.pinned_io import send
from djinnd.model.copies.upload import upload
from djinnd.model.sampling.logit_shifts import LogitShifts, ShiftTable, is_shifted
from djinnd.model.sampling.noise import gumbel, noise_keys, noise_streams
from djinnd.model.sampling.token_marks import BLANK, Penalties, TokenMarks, penalised

_TINY = torch.finfo(torch.float64).tiny
_WEIGHT_OF_PEAK = 1 << 40  # fixed point: the weights of 2^22 tokens still sum up within 63 bits


def is_greedy(request: Request) -> bool:
    """Returns True if the request's token is always the argmax of the raw logits."""
    return request.sampling.temperature == 0 and not is_penalised(request.sampling) and not is_shifted(request)


class Draw:
    """Some rows of a batch, with their sampling parameters on the device. The parameters are uploaded once and used as
    long as the batch has the same rows. Only operations that at least one of these rows needs are run."""

    def __init__(
        self, members: Sequence[int], requests: Sequence[Request], marks: TokenMarks, shifts: ShiftTable
    ) -> None:
        """members: indices of the rows in the batch. requests: one for each member, in the same order."""
        samplings = [request.sampling for request in requests]
        top_ks = [_ranks_of(sampling, shifts.vocab) for sampling in samplings]
        slots = [marks.slot(request) if is_penalised(request.sampling) else BLANK for request in requests]
        self.members = members
        self._marks = marks
        self._random = any(sampling.temperature > 0 for sampling in samplings)
        self._nucleus = any(sampling.temperature > 0 and sampling.top_p < 1 for sampling in samplings)
        self._shifts = LogitShifts(requests, shifts, marks.device)
        self._marked = [index for index, slot in enumerate(slots) if slot != BLANK]
        depths = [_depth(sampling) for sampling in samplings]
        self._cut_below_peak = min(depths) < math.inf

        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return upload([(value,) for value in values], dtype, marks.device)

        self.rows = upload(members, torch.int64, marks.device)
        self._streams = noise_streams(torch.tensor([_seed(sampling) for sampling in samplings]))  # on the host
        # Two, in turns: a step may be launched before the device has read the keys of the last one. That of the step
        # before the last has been read, because the host has its tokens.
        pinned = marks.device.type == "cuda"
        self._keys_stagings = [torch.empty(len(members), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._keys = torch.empty(len(members), dtype=torch.int64, device=marks.device)
        self._slots = upload(slots, torch.int64, marks.device)
        self._ranks = torch.arange(max(top_ks), device=marks.device)  # empty where no row has a top-k or a top-p
        self._top_k = column(top_ks, torch.int64)
        self._unranked = self._top_k == 0
        self._top_p = column([s.top_p if s.top_p < 1 else math.inf for s in samplings])
        self._temperature = column([s.temperature for s in samplings])
        self._depth = column(depths)
        self._penalties = Penalties(
            column([s.repetition_penalty for s in samplings], torch.float32),
            column([s.presence_penalty for s in samplings], torch.float32),
            column([s.frequency_penalty for s in samplings], torch.float32)
            if any(s.frequency_penalty for s in samplings)
            else None,
        )

    def choose(self, logits: Tensor, counters: Tensor, sessions: Sequence[Session], lengths: Sequence[int]) -> Tensor:
        """Chooses a token for each member → int64 [members].

        logits: raw logits [rows, vocab] of the whole batch. sessions, and the positions of their tokens: one for each
            member.
        """
        logits = logits.index_select(0, self.rows).float()
        if self._shifts:
            self._shifts.add_to(logits, lengths)
        if self._marked:
            self._marks.follow(sessions[index] for index in self._marked)
            logits = penalised(logits, self._marks.rows(self._slots), self._penalties)
        if not self._random:
            return logits.argmax(dim=-1)
        keys = noise_keys(self._streams, torch.tensor(lengths))
        self._keys_stagings.reverse()
        staging = self._keys_stagings[0]
        staging.copy_(keys)
        send(self._keys, staging)
        noise = gumbel(self._keys, counters)
        score = noise.mul_(self._temperature).add_(logits)
        if self._ranks.numel():
            score.masked_fill_(logits < self._lowest_ranked(logits), -math.inf)
        if self._cut_below_peak:
            score.masked_fill_(logits < self._lowest_below_peak(logits), -math.inf)
        return score.argmax(dim=-1)

    def _lowest_ranked(self, logits: Tensor) -> Tensor:
        """[rows, 1]: the lowest logit that top-k and then top-p keep; -inf for a row without either."""
        limit, vocab = self._ranks.numel(), logits.shape[1]
        ranked = (logits.topk(limit) if limit < vocab else logits.sort(descending=True)).values
        kept = self._nucleus_of(ranked) if self._nucleus else self._top_k
        return ranked.gather(1, (kept - 1).clamp_(min=0)).masked_fill_(self._unranked, -math.inf)

    def _nucleus_of(self, ranked: Tensor) -> Tensor:
        """int64 [rows, 1]: how many of the ranks within top-k top-p keeps. It keeps a rank if the ranks above it have
        less than p of the probability.

        Weights are summed as integers, which is exact in any order. A device may scan a batch of one in another order
        than a larger batch, and still finds the same last token.
        """
        allowed = self._ranks < self._top_k
        weight = (ranked.double() - ranked[:, :1]).div_(self._temperature.clamp(min=_TINY)).exp_()
        weight = weight.mul_(_WEIGHT_OF_PEAK).long().mul_(allowed)
        total = weight.cumsum(dim=-1)
        return (allowed & (total - weight < self._top_p * total[:, -1:])).sum(dim=-1, keepdim=True)

    def _lowest_below_peak(self, logits: Tensor) -> Tensor:
        """[rows, 1]: the lowest logit that min-p keeps. min-p is a fixed distance from the highest logit, because the
        denominator of the softmax cancels out of p >= min_p * peak."""
        return (logits.amax(dim=-1, keepdim=True) - self._depth).float()


def is_penalised(sampling: Sampling) -> bool:
    """Returns True if a token depends on which tokens came before, beside the model."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def _depth(sampling: Sampling) -> float:
    """Distance from the highest logit to the lowest one that min-p keeps; infinity without min-p."""
    if sampling.temperature == 0 or sampling.min_p == 0:
        return math.inf
    return -math.log(sampling.min_p) * sampling.temperature


def _ranks_of(sampling: Sampling, vocab: int) -> int:
    """How many ranks top-k keeps: all of them if only top-p limits the row, 0 if neither does."""
    if sampling.temperature == 0:
        return 0
    if 0 < sampling.top_k < vocab:
        return sampling.top_k
    return vocab if sampling.top_p < 1 else 0


def _seed(sampling: Sampling) -> int:
    assert sampling.seed is not None or sampling.temperature == 0, "the server draws and records a seed"
    return sampling.seed or 0
