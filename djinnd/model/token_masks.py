"""Masks of tokens: which of them the next one may be, a bit each, as the host has them.

host      words, uint32 [rows, vocab / 32]    copied into memory that the device reads
device    bits ──► logits of the other tokens become -inf, a group of rows at a time
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.model.crossing import send
from djinnd.model.upload import upload

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowMasks:
    """`rows`: of the logits, ascending. `words`: each one's mask, all of the same even length."""

    rows: Sequence[int]
    words: Sequence[npt.NDArray[np.uint32]]


class TokenMasks:
    """Applies them. Its staging is read by one step at a time."""

    def __init__(self, vocab: int, device: torch.device, group_logits: int) -> None:
        """`group_logits`: that are worked on at once, which bounds the device memory of a call."""
        self._vocab = vocab
        self._device = device
        self._group = max(1, group_logits // vocab)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._words = self._staging.numpy().view(np.uint32)
        self._bits = torch.empty(0, dtype=torch.uint8, device=device)

    def apply(self, logits: Tensor, masks: RowMasks) -> None:
        """logits: [rows, vocab], changed in place."""
        count, width = len(masks.rows), WORD_BYTES * len(masks.words[0])
        self._reserve(count * width)
        np.stack(masks.words, out=self._words[: count * width // WORD_BYTES].reshape(count, -1))
        send(self._bits[: count * width], self._staging[: count * width])
        bits = self._bits[: count * width].view(count, width, 1)
        places = upload(masks.rows, torch.int64, self._device)
        for first in range(0, count, self._group):
            some = slice(first, min(first + self._group, count))
            allowed = bits[some].bitwise_right_shift(self._shifts).bitwise_and_(1)
            blocked = allowed.view(-1, 8 * width)[:, : self._vocab] == 0
            rows = places[some]
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(blocked, -math.inf))

    def _reserve(self, nbytes: int) -> None:
        if nbytes > len(self._staging):
            size = 1 << (nbytes - 1).bit_length()
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._words = self._staging.numpy().view(np.uint32)
            self._bits = torch.empty(size, dtype=torch.uint8, device=self._device)
