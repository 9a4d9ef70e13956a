"""Log probabilities of prompts' tokens, from the step that computes them to the server.

They are computed on the device, from a bounded number of logits at a time, and copied to the host after the step: a few
numbers a token instead of a row of logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.core.batch import Row
from djinnd.messages import PromptScored
from djinnd.model.copies.upload import upload
from djinnd.model.sampling.logprobs import TokenLogprobs, token_logprobs
from djinnd.model.tuning import GROUP_LOGITS


class _Scored(NamedTuple):
    request: int
    parts: list[TokenLogprobs]


class PromptScorer:
    """The scores of one model's last step."""

    def __init__(self) -> None:
        self._scored: list[_Scored] = []

    def add(self, row: Row, positions: range, pieces: Iterable[Tensor]) -> None:
        """`pieces`: the logits at `positions` of the row, each [rows, vocab]. They score the tokens at the next
        positions."""
        likeliest = row.request.prompt_logprobs
        assert likeliest is not None
        parts, start = [], positions.start + 1
        for piece in pieces:
            targets = upload(row.session.tokens[start : start + len(piece)], torch.int64, piece.device)
            start += len(piece)
            most = max(1, GROUP_LOGITS // piece.shape[1])
            groups = zip(piece.split(most), targets.split(most), strict=True)
            parts += [token_logprobs(logits, some, likeliest) for logits, some in groups]
        self._scored.append(_Scored(row.request.id, parts))

    def take(self) -> list[PromptScored]:
        """Waits for the device. → the scores, which are then forgotten."""
        scored, self._scored = self._scored, []
        return [_message(*each) for each in scored]

    def clear(self) -> None:
        """Drops the scores of a step that failed."""
        self._scored.clear()


def _message(request: int, parts: list[TokenLogprobs]) -> PromptScored:
    own, top, values = (torch.cat([part[field] for part in parts]) for field in range(3))
    numbers = torch.cat([own[:, None], values], dim=1).cpu().numpy().astype("<f4")
    return PromptScored(request, len(numbers), numbers.tobytes(), top.cpu().numpy().astype("<i4").tobytes())
