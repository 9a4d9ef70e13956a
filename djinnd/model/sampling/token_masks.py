"""Masks of allowed next tokens, one bit for each token of the vocabulary.

host      words, uint32 [rows, vocab / 32], gathered in one piece of memory
device    a kernel reads them there, and sets the logits of all other tokens to -inf
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.jobs.grammar import words_of
from djinnd.model.tuning import GROUP_LOGITS

_WORD_BYTES, _ROW_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class RowMasks:
    """`rows`: rows of the logits, ascending. `words`: the mask of each row, all of the same even length.

    `guessed`: for rows of the step with a guess and a grammar, by index among the rows that sample, how many tokens of
    the guess have a mask behind them. Samples behind further tokens do not count.
    """

    rows: Sequence[int]
    words: Sequence[npt.NDArray[np.uint32]]
    guessed: Mapping[int, int] = field(default_factory=dict)


class TokenMasks:
    """Applies masks. The device reads them from the host's memory, so a call waits for no copy. The next call comes
    after the step is over."""

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)

    def apply(self, logits: Tensor, masks: RowMasks) -> None:
        """logits: [rows, vocab], changed in place."""
        rows, words = self._gathered(masks, logits.is_cuda)
        if logits.is_cuda:
            from djinnd.model.kernels.host_memory.block_tokens import (
                block_tokens,  # needs Triton, which comes with CUDA builds
            )

            block_tokens(logits, rows, words)
        else:
            _block(logits, rows, words)

    def _gathered(self, masks: RowMasks, pinned: bool) -> tuple[Tensor, Tensor]:
        """int64 [n] and int32 [n, words], on the host."""
        count, width = len(masks.rows), len(masks.words[0])
        start = _WORD_BYTES * count * width
        end = start + _ROW_BYTES * count
        if end > len(self._staging):
            self._staging = torch.empty(1 << (end - 1).bit_length(), dtype=torch.uint8, pin_memory=pinned)
        words = self._staging[:start].view(torch.int32)
        np.concatenate(masks.words, out=words.numpy().view(np.uint32))
        rows = self._staging[start:end].view(torch.int64)
        rows.numpy()[:] = masks.rows
        return rows, words.view(count, width)


def _block(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Blocks the tokens of a few rows at a time, so that a call takes little memory."""
    vocab = logits.shape[1]
    group = max(1, GROUP_LOGITS // vocab)
    for some, mask in zip(rows.split(group), words.split(group), strict=True):
        bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        blocked = torch.from_numpy(bits) == 0
        if len(rows) == len(logits):
            logits[int(some[0]) : int(some[-1]) + 1].masked_fill_(blocked, -math.inf)
        else:
            logits.index_copy_(0, some, logits.index_select(0, some).masked_fill_(blocked, -math.inf))


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernel of `TokenMasks.apply` for a model's logits, so that no step waits for it."""
    words = np.zeros(words_of(vocab), np.uint32)
    TokenMasks().apply(torch.zeros(1, vocab, dtype=dtype, device=device), RowMasks([0], [words]))
