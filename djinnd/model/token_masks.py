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
        self._weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._words = self._staging.numpy().view(np.uint32)
        self._bits = torch.empty(0, dtype=torch.uint8, device=device)

    def apply(self, logits: Tensor, masks: RowMasks) -> None:
        """logits: [rows, vocab], changed in place."""
        allowed = self._send(masks)
        places = None if len(masks.rows) == len(logits) else upload(masks.rows, torch.int64, self._device)
        for first in range(0, len(masks.rows), self._group):
            some = slice(first, first + self._group)
            blocked = self._blocked(allowed[some])
            if places is None:
                logits[some].masked_fill_(blocked, -math.inf)
            else:
                rows = places[some]
                logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(blocked, -math.inf))

    def _send(self, masks: RowMasks) -> Tensor:
        """uint8 [rows, bytes], on the device."""
        shape = len(masks.rows), len(masks.words[0])
        nbytes = WORD_BYTES * shape[0] * shape[1]
        self._reserve(nbytes)
        np.stack(masks.words, out=self._words[: shape[0] * shape[1]].reshape(shape))
        if self._device.type == "cpu":
            return self._staging[:nbytes].view(shape[0], -1)
        send(self._bits[:nbytes], self._staging[:nbytes])
        return self._bits[:nbytes].view(shape[0], -1)

    def _blocked(self, allowed: Tensor) -> Tensor:
        """bool [rows, vocab]: tokens that may not come."""
        if self._device.type == "cpu":  # which has an instruction for that
            bits = np.unpackbits(allowed.numpy(), axis=1, count=self._vocab, bitorder="little")
            return torch.from_numpy(bits) == 0
        bits_of_byte = allowed[:, :, None].bitwise_and(self._weights)
        return (bits_of_byte == 0).view(len(allowed), -1)[:, : self._vocab]

    def _reserve(self, nbytes: int) -> None:
        if nbytes > len(self._staging):
            size = 1 << (nbytes - 1).bit_length()
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._words = self._staging.numpy().view(np.uint32)
            if self._device.type != "cpu":
                self._bits = torch.empty(size, dtype=torch.uint8, device=self._device)
