"""The tokens that the last step has sampled, on the device, for a step that is launched before the host reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class LastTokens:
    """Owns int64 [1 + rows] on the device: a zero, and the tokens of up to `rows` rows. Captured graphs keep its
    address."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._tokens = torch.zeros(1 + rows, dtype=torch.int64, device=device)

    def keep(self, tokens: Tensor) -> None:
        """Queues a copy of a step's tokens, int64 [n]. -1 stands for a row with logits that are no numbers. Its request
        ends, and in the step that follows it runs token 0."""
        torch.clamp(tokens, min=0, out=self._tokens[1 : 1 + len(tokens)])

    def feed(self, ids: Tensor) -> None:
        """Replaces the ids -1 - n, int64 [tokens], by the n-th token, in place. The zero stands for all other ids,
        which are larger or equal: so one maximum merges both, with no branch on what the device holds."""
        torch.maximum(ids, self._tokens.index_select(0, ids.neg().clamp_(min=0)), out=ids)
