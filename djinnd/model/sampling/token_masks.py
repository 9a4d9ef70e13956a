"""Masks of allowed next tokens, one bit for each token of the vocabulary.

host      words, uint32 [rows, vocab / 32], gathered in one piece of memory device    a kernel reads them there, and
logits of the other tokens become -inf
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.jobs.grammar import words_of

WORD_BYTES = 4
_ROW_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowMasks:
    """`rows`: rows of the logits, ascending. `words`: the mask of each row, all of the same even length."""

    rows: Sequence[int]
    words: Sequence[npt.NDArray[np.uint32]]


class TokenMasks:
    """Applies masks. The device reads them from the host's memory, so a call waits for no copy. The next call comes
    after the step is over."""

    def __init__(self, vocab: int, device: torch.device, group_logits: int) -> None:
        """`group_logits`: most logits that a CPU masks at once; bounds the memory of a call."""
        self._vocab = vocab
        self._device = device
        self._group = max(1, group_logits // vocab)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def apply(self, logits: Tensor, masks: RowMasks) -> None:
        """logits: [rows, vocab], changed in place."""
        rows, words = self._gathered(masks)
        if self._device.type == "cpu":
            self._block(logits, rows, words)
            return
        from djinnd.model.kernels.block_tokens import block_tokens  # needs Triton, which comes with CUDA builds

        block_tokens(logits, rows, words)

    def _gathered(self, masks: RowMasks) -> tuple[Tensor, Tensor]:
        """int64 [n] and int32 [n, words], on the host."""
        count, width = len(masks.rows), len(masks.words[0])
        start = WORD_BYTES * count * width
        end = start + _ROW_BYTES * count
        if end > len(self._staging):
            size = 1 << (end - 1).bit_length()
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        words = self._staging[:start].view(torch.int32)
        np.concatenate(masks.words, out=words.numpy().view(np.uint32))
        rows = self._staging[start:end].view(torch.int64)
        rows.numpy()[:] = masks.rows
        return rows, words.view(count, width)

    def _block(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        for some, mask in zip(rows.split(self._group), words.split(self._group), strict=True):
            bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=self._vocab, bitorder="little")
            blocked = torch.from_numpy(bits) == 0
            if len(rows) == len(logits):
                logits[int(some[0]) : int(some[-1]) + 1].masked_fill_(blocked, -math.inf)
            else:
                logits.index_copy_(0, some, logits.index_select(0, some).masked_fill_(blocked, -math.inf))


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles what `apply` runs on a model's logits: no step waits for it then."""
    words = np.zeros(words_of(vocab), np.uint32)
    TokenMasks(vocab, device, vocab).apply(torch.zeros(1, vocab, dtype=dtype, device=device), RowMasks([0], [words]))
