"""Logit shifts: numbers that requests add to raw logits. A bias shifts some tokens; a bar adds -inf to the stop tokens
until the output has min_tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.core.request import Request
from djinnd.model.copies.upload import upload

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float32]


def is_shifted(request: Request) -> bool:
    """Returns True if the request has biases or min_tokens."""
    return bool(request.sampling.logit_bias or request.sampling.min_tokens)


class _Entries(NamedTuple):
    """A request's shifts, wherever its row is in the batch."""

    tokens: Numbers  # int64 [entries]
    values: Numbers  # float32 [entries], added to the logits of these tokens


class ShiftTable:
    """The shifts of each request as arrays. The arrays of biases are kept, because the batch may change in every step
    and a request may have a thousand biases."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._biases: dict[Request, _Entries] = {}

    def bias(self, request: Request) -> _Entries:
        if request not in self._biases:
            bias = request.sampling.logit_bias
            self._biases[request] = self._entries(bias.keys(), bias.values())
        return self._biases[request]

    def bar(self, request: Request) -> _Entries:
        return self._entries(request.stop_tokens, [-math.inf] * len(request.stop_tokens))

    def forget(self, request: Request) -> None:
        """Drops the request's arrays. Called when any request ends."""
        self._biases.pop(request, None)

    def _entries(self, tokens: Collection[int], values: Collection[float]) -> _Entries:
        """Leaves tokens past the head out: checkpoints may list them as end tokens, but they have no logit."""
        ids, numbers = np.array([*tokens], np.int64), np.array([*values], np.float32)
        return _Entries(ids[ids < self.vocab], numbers[ids < self.vocab])


class LogitShifts:
    """The shifts of some rows of a batch, on the device. Valid as long as the batch has the same rows."""

    def __init__(self, requests: Sequence[Request], table: ShiftTable, device: torch.device) -> None:
        """requests: one for each row, in the order of the rows."""
        self._requests = requests
        self._table = table
        self._device = device
        biased = [row for row, request in enumerate(requests) if request.sampling.logit_bias]
        self._biases = self._shift(biased, [table.bias(requests[row]) for row in biased])
        self._barred = [
            (row, request.prompt_end + request.sampling.min_tokens)
            for row, request in enumerate(requests)
            if request.sampling.min_tokens and request.stop_tokens
        ]
        self._closed: list[int] = []  # rows that were below min_tokens in the last step
        self._bars = self._shift([], [])

    def __bool__(self) -> bool:
        return bool(self._barred) or self._biases.places.numel() > 0

    def add_to(self, logits: Tensor, lengths: Sequence[int]) -> None:
        """Adds the shifts in place. logits: float32 [rows, vocab], contiguous; lengths: tokens before each row's
        own."""
        self._biases.add_to(logits)
        if self._barred:
            self._follow(lengths)
            self._bars.add_to(logits)

    def _follow(self, lengths: Sequence[int]) -> None:
        """Updates the bars. Uploads only if a row has reached its min_tokens since the last step."""
        closed = [row for row, until in self._barred if lengths[row] < until]
        if closed != self._closed:
            self._closed = closed
            self._bars = self._shift(closed, [self._table.bar(self._requests[row]) for row in closed])

    def _shift(self, rows: Sequence[int], entries: Sequence[_Entries]) -> _Shift:
        places: list[Numbers] = [each.tokens + row * self._table.vocab for row, each in zip(rows, entries, strict=True)]
        values = [each.values for each in entries]
        return _Shift(
            upload(np.concatenate([np.empty(0, np.int64), *places]), torch.int64, self._device),
            upload(np.concatenate([np.empty(0, np.float32), *values]), torch.float32, self._device),
        )


class _Shift(NamedTuple):
    """Shifts of a batch, on the device."""

    places: Tensor  # int64 [entries], indices into the flattened logits
    values: Tensor  # float32 [entries]

    def add_to(self, logits: Tensor) -> None:
        if self.places.numel():
            logits.view(-1).index_add_(0, self.places, self.values)
