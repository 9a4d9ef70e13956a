"""TokenMarks: a table on the device of the tokens that a session has, and how often its output has them. Penalties need
it.

    marks   int16 [slots, vocab]     SEEN if the prompt has the token, plus GENERATED for each time that the output has
                                     it; the count stops at 16,000

Slot 0 stays blank and serves all requests without penalties. A request owns a slot from its first `slot` until
`forget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.model.copies.upload import upload

SEEN = 1
GENERATED = 2
BLANK = 0  # the slot of requests without penalties
_MOST = 16_000 * GENERATED + SEEN


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of a batch's rows, float32 [rows, 1] each. `frequency` None: no row has one."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor | None = None


@dataclass(slots=True)
class _Entry:
    slot: int
    covered: int  # tokens of the session that are marked


class TokenMarks:
    """Owns the marks, and the slots of requests."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.device = device
        self._vocab = vocab
        self._marks = torch.zeros(1, vocab, dtype=torch.int16, device=device)
        self._entries: dict[Request, _Entry] = {}
        self._free: list[int] = []

    def slot(self, request: Request) -> int:
        """The request's slot. Takes and clears one if the request has none."""
        entry = self._entries.get(request)
        if entry is None:
            if not self._free:
                self._grow()
            entry = self._entries[request] = _Entry(self._free.pop(), covered=0)
            self._marks[entry.slot].zero_()
        return entry.slot

    def forget(self, request: Request) -> None:
        """Frees the request's slot. Also called before a session is truncated during its request."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry.slot)

    def follow(self, sessions: Iterable[Session]) -> None:
        """Marks the tokens that are new since the last call. Takes time in proportion to the new tokens, not to the
        length of the sessions."""
        prompt: list[int] = []
        output: list[int] = []
        for session in sessions:
            request, tokens = session.request, session.tokens
            assert request is not None
            entry = self._entries[request]
            assert entry.covered <= len(tokens), "truncated under a running request: forget it first"
            base = entry.slot * self._vocab
            for index in range(entry.covered, len(tokens)):
                if tokens[index] < self._vocab:  # an embedding may be larger than the head
                    (prompt if index < request.prompt_end else output).append(base + tokens[index])
            entry.covered = len(tokens)
        marks = self._marks.view(-1)
        if prompt:  # comes before the output's counts, which it would overwrite
            marks.index_fill_(0, upload(prompt, torch.int64, self.device), SEEN)
        if output:
            counts = Counter(output)
            places = upload([*counts], torch.int64, self.device)
            times = upload([*counts.values()], torch.int32, self.device)
            counted = marks.index_select(0, places).int().add_(times, alpha=GENERATED).clamp_(max=_MOST)
            marks.index_copy_(0, places, counted.short())

    def rows(self, slots: Tensor) -> Tensor:
        """slots int64 [rows] → a copy of their marks, int16 [rows, vocab]."""
        return self._marks.index_select(0, slots)

    def _grow(self) -> None:
        """Doubles the number of slots. Existing slots keep their numbers and marks."""
        slots = self._marks.shape[0]
        self._free.extend(range(2 * slots - 1, slots - 1, -1))
        self._marks = torch.cat([self._marks, torch.zeros_like(self._marks)])


def penalised(logits: Tensor, marks: Tensor, penalties: Penalties) -> Tensor:
    """Applies penalties: logits float32 [rows, vocab], marks int16 [rows, vocab] → logits.

    Repetition is as in CTRL (Keskar et al. 2019): for tokens in prompt or output, positive logits are divided by the
    penalty and negative ones multiplied by it. Then the frequency penalty is subtracted for each time that the output
    has the token, and the presence penalty once; vLLM has the same order. Penalties 1, 0 and 0 change no bit.
    """
    repeated = torch.where(logits < 0, logits * penalties.repetition, logits / penalties.repetition)
    logits = torch.where(marks > 0, repeated, logits)
    if penalties.frequency is not None:
        logits = logits - penalties.frequency * (marks // GENERATED)
    return logits - penalties.presence * (marks >= GENERATED)
