"""What requests add to raw logits: a bias for some tokens, and -inf for the tokens that must not end an output yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.model.upload import upload


def is_shifted(request: Request) -> bool:
    return bool(request.sampling.logit_bias or request.sampling.min_tokens)


class _Barred(NamedTuple):
    """Tokens that a row does not choose while its session is shorter than `until`."""

    row: int
    until: int
    tokens: list[int]


class LogitShifts:
    """Of some rows of a batch, for as long as the batch keeps its composition."""

    def __init__(self, requests: Sequence[Request], vocab: int, device: torch.device) -> None:
        """`requests`: the rows', in their order."""
        self._vocab = vocab
        self._device = device
        self._biases = self._shift(
            (row, token, bias)
            for row, request in enumerate(requests)
            for token, bias in request.sampling.logit_bias.items()
        )
        self._barred = [
            _Barred(row, request.prompt_end + request.sampling.min_tokens, sorted(request.stop_tokens))
            for row, request in enumerate(requests)
            if request.sampling.min_tokens and request.stop_tokens
        ]
        self._closed: list[_Barred] = []  # those that hold in the step that ran last
        self._bars = self._shift(())

    def __bool__(self) -> bool:
        return bool(self._barred) or self._biases.places.numel() > 0

    def add_to(self, logits: Tensor, sessions: Sequence[Session]) -> None:
        """In place. logits: float32 [rows, vocab], contiguous; sessions: the rows'."""
        self._biases.add_to(logits)
        if self._barred:
            self._follow(sessions)
            self._bars.add_to(logits)

    def _follow(self, sessions: Sequence[Session]) -> None:
        """Uploads something only when a row has come to its min_tokens."""
        closed = [barred for barred in self._barred if len(sessions[barred.row].tokens) < barred.until]
        if closed != self._closed:
            self._closed = closed
            self._bars = self._shift((barred.row, token, -math.inf) for barred in closed for token in barred.tokens)

    def _shift(self, entries: Iterable[tuple[int, int, float]]) -> _Shift:
        """Of (row, token, value). Tokens past the head, which checkpoints may name as their end, have no logit."""
        kept = [(row * self._vocab + token, value) for row, token, value in entries if token < self._vocab]
        places = upload([place for place, _ in kept], torch.int64, self._device)
        return _Shift(places, upload([value for _, value in kept], torch.float32, self._device))


class _Shift(NamedTuple):
    """int64 and float32 [entries]: a place in the flattened logits, and what is added there."""

    places: Tensor
    values: Tensor

    def add_to(self, logits: Tensor) -> None:
        if self.places.numel():
            logits.view(-1).index_add_(0, self.places, self.values)
