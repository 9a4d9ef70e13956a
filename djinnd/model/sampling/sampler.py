"""Sampler: chooses the next token of every row on the device.

    raw logits ─► argmax ─────────────────────────────────────────────────────────────────────► greedy rows
         └─ other rows ─► biases, penalties ─► + temperature * Gumbel noise, where kept ─► argmax
                                         └─► top-k ─► top-p ─► min-p: the lowest kept logit ─┘

The argmax of logits plus Gumbel noise is a draw from their softmax (Gumbel-max). The noise is multiplied by the
temperature instead of dividing the logits by it, so temperature 0 is greedy by the same formula.

The limits apply in the order of transformers' logits warpers: each works on the tokens that the one before has kept,
with probabilities after penalties and temperature. A limit never cuts between equal logits: tokens that tie with the
last kept token are kept. So the result does not depend on the order of a sort.

A greedy row without penalties and biases costs one argmax, whatever else is in the batch. A call waits once for the
device; log probabilities add three short copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from djinn_client.protocol import Logprobs
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.model.copies.pinned_io import Asked, ResultReader
from djinnd.model.copies.upload import upload
from djinnd.model.sampling.draw import Draw, is_greedy
from djinnd.model.sampling.logit_shifts import ShiftTable
from djinnd.model.sampling.logprobs import token_logprobs
from djinnd.model.sampling.noise import vocabulary_counters
from djinnd.model.sampling.token_marks import TokenMarks
from djinnd.model.sampling.token_masks import RowMasks, TokenMasks
from djinnd.model.tuning import GROUP_LOGITS

# At most in a sort: 24 bytes of each logit for the noise and for its input and output, and 32 for its own copies; 8
# for raw logits. To these the allocator adds up to 1 MiB for each of a dozen tensors: it splits no block to save less.
TEMPORARY_BYTES = 64 * GROUP_LOGITS + (16 << 20)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, one entry a row.

    `unsound` lists the rows with NaN or +inf among their logits, or with no logit above -inf. Their token is the
    likeliest of the finite ones, or 0 if the next step has been launched, and they have no log probabilities. The
    caller decides how their requests end.

    `further`, by row: the tokens after the row's own, because its guess was right.
    """

    tokens: list[int]
    logprobs: list[Logprobs | None]
    unsound: list[int]
    late: Sequence[int] = ()  # rows that had no mask in time, or a spoilt guess: their tokens are discarded
    further: Mapping[int, Sequence[tuple[int, Logprobs | None]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Told:
    """A group of rows that report log probabilities."""

    members: Sequence[int]  # indices of the rows
    rows: Tensor  # the same, int64 on the device
    counts: list[int]  # likeliest tokens to report for each


@dataclass(frozen=True, slots=True)
class _Plan:
    """The groups of a batch and their parameters, kept as long as the same requests are in the batch, in the same
    order. Requests compare by identity."""

    requests: tuple[Request, ...] = ()
    draws: tuple[Draw, ...] = ()
    told: tuple[_Told, ...] = ()


@dataclass(slots=True)
class Queued:
    """Tokens that the device is choosing, for `Sampler.read`. Keeps the plan's host memory, which the device may still
    read."""

    asked: Asked
    plan: _Plan
    logits: Tensor | None  # None: the next step may have overwritten them, and unsound rows get token 0
    chosen: Tensor  # int64 [rows], on the device
    raw: list[Tensor]  # logits of the rows that report log probabilities, before masks


class Sampler:
    """Owns the token marks (penalties) and logit shifts (biases) of requests, each until `forget`."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        assert 0 < vocab <= GROUP_LOGITS
        self._vocab = vocab
        self._device = device
        self._counters = vocabulary_counters(vocab, device)
        self._marks = TokenMarks(vocab, device)
        self._shifts = ShiftTable(vocab)
        self._masks = TokenMasks()
        self._plan = _Plan()
        self._inbox = ResultReader()

    def sample(
        self,
        logits: Tensor,
        sessions: Sequence[Session],
        meanwhile: Callable[[], bool] = lambda: False,
        masks: RowMasks | None = None,
        ahead: Sequence[int] | None = None,
    ) -> Sampled:
        """`queue`, and then `read`."""
        return self.read(self.queue(logits, sessions, masks, ahead), meanwhile)

    @torch.inference_mode()
    def queue(
        self,
        logits: Tensor,
        sessions: Sequence[Session],
        masks: RowMasks | None = None,
        ahead: Sequence[int] | None = None,
    ) -> Queued:
        """Chooses each session's token at position len(tokens) by its request's sampling, on the device. The caller
        appends it. At most two calls may be unread.

        logits: [rows, vocab], any float dtype; unchanged except for tokens that `masks` forbid.
        sessions: one a row, each with a request, which has a seed if its temperature is above 0.
        ahead: for each row, how many further positions its token is ahead; None: 0. A session may have several rows.
            With penalties, only one with 0: they depend on all tokens before.
        """
        assert logits.shape == (len(sessions), self._vocab)
        plan = self._plan_for(sessions)
        raw = [logits.index_select(0, told.rows).float() for told in plan.told]
        if masks is not None:
            self._masks.apply(logits, masks)
        peak, chosen = logits.max(dim=-1)
        for draw in plan.draws:
            members = [sessions[row] for row in draw.members]
            lengths = [len(session.tokens) for session in members]
            if ahead is not None:
                lengths = [length + ahead[row] for length, row in zip(lengths, draw.members, strict=True)]
            chosen.index_copy_(0, draw.rows, draw.choose(logits, self._counters, members, lengths))
        # One copy brings both to the host: -1 marks an unsound row.
        asked = self._inbox.ask(torch.where(peak.abs() < math.inf, chosen, -1))
        return Queued(asked, plan, logits, chosen, raw)

    @torch.inference_mode()
    def read(self, queued: Queued, meanwhile: Callable[[], bool] = lambda: False) -> Sampled:
        """Waits for the tokens. Results are read in the order in which they were queued. `meanwhile`: see
        ResultReader.read."""
        tokens = self._inbox.read(queued.asked, meanwhile)
        unsound = [row for row, token in enumerate(tokens) if token < 0]
        if unsound:
            finite = [0] * len(unsound) if queued.logits is None else _likeliest_finite(queued.logits[unsound])
            for row, token in zip(unsound, finite, strict=True):
                tokens[row] = token
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        for told, own in zip(queued.plan.told, queued.raw, strict=True):
            for row, entry in zip(told.members, _logprobs(own, queued.chosen, told), strict=True):
                logprobs[row] = None if row in unsound else entry
        return Sampled(tokens, logprobs, unsound)

    def forget(self, request: Request) -> None:
        """Releases all that is kept for a request. Called when any request ends."""
        self._marks.forget(request)
        self._shifts.forget(request)
        if request in self._plan.requests:
            self._plan = _Plan()

    def _plan_for(self, sessions: Sequence[Session]) -> _Plan:
        requests = tuple(_request(session) for session in sessions)
        if self._plan.requests != requests:
            drawn = [row for row, request in enumerate(requests) if not is_greedy(request)]
            told = [row for row, request in enumerate(requests) if request.logprobs is not None]
            self._plan = _Plan(
                requests,
                tuple(Draw(g, [requests[row] for row in g], self._marks, self._shifts) for g in self._groups(drawn)),
                tuple(self._told(g, requests) for g in self._groups(told)),
            )
        return self._plan

    def _groups(self, rows: list[int]) -> Iterator[list[int]]:
        size = GROUP_LOGITS // self._vocab
        return (rows[start : start + size] for start in range(0, len(rows), size))

    def _told(self, members: list[int], requests: tuple[Request, ...]) -> _Told:
        counts = [min(requests[row].logprobs or 0, self._vocab) for row in members]
        return _Told(members, upload(members, torch.int64, self._device), counts)


def _request(session: Session) -> Request:
    assert session.request is not None
    return session.request


def _likeliest_finite(logits: Tensor) -> list[int]:
    return torch.nan_to_num(logits.float(), nan=-math.inf, posinf=-math.inf).argmax(dim=-1).tolist()


def _logprobs(raw: Tensor, chosen: Tensor, told: _Told) -> Iterator[Logprobs]:
    """Log probabilities of the rows of `told`, from their raw logits."""
    found = token_logprobs(raw, chosen.index_select(0, told.rows), max(told.counts))
    own, tokens, values = (part.tolist() for part in found)
    for row, count in enumerate(told.counts):
        yield Logprobs(own[row], dict(zip(tokens[row][:count], values[row][:count], strict=True)))
