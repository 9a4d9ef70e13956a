"""Which tokens a session holds, and how often the output has them, on the device for requests that use penalties.

    marks   int16 [slots, vocab]     SEEN where the prompt has the token, and GENERATED for each time in the output, of
                                     which 16,000 are counted

Slot 0 stays blank and stands for every request without penalties. A request owns its slot from the first `follow` that
names its session until `forget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.model.upload import upload

SEEN = 1
GENERATED = 2
BLANK = 0  # the slot
_MOST = 16_000 * GENERATED + SEEN


@dataclass(frozen=True, slots=True)
class Penalties:
    """float32 [rows, 1] each. `frequency` None: no row has one."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor | None = None


@dataclass(slots=True)
class _Entry:
    slot: int
    covered: int  # tokens of the session that are marked


class TokenMarks:
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.device = device
        self._vocab = vocab
        self._marks = torch.zeros(1, vocab, dtype=torch.int16, device=device)
        self._entries: dict[Request, _Entry] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Requests that own a slot."""
        return len(self._entries)

    def slot(self, request: Request) -> int:
        """The request's slot, taken and cleared where it had none."""
        entry = self._entries.get(request)
        if entry is None:
            if not self._free:
                self._grow()
            entry = self._entries[request] = _Entry(self._free.pop(), covered=0)
            self._marks[entry.slot].zero_()
        return entry.slot

    def forget(self, request: Request) -> None:
        """Gives the slot back. Also what to call before a session is truncated under a running request."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry.slot)

    def follow(self, sessions: Iterable[Session]) -> None:
        """Marks the tokens that have come since the last call: work in proportion to those, not to the sessions."""
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
        if prompt:  # before the output is counted, which this would overwrite
            marks.index_fill_(0, upload(prompt, torch.int64, self.device), SEEN)
        if output:
            counts = Counter(output)
            places = upload([*counts], torch.int64, self.device)
            times = upload([*counts.values()], torch.int32, self.device)
            counted = marks.index_select(0, places).int().add_(times, alpha=GENERATED).clamp_(max=_MOST)
            marks.index_copy_(0, places, counted.short())

    def rows(self, slots: Tensor) -> Tensor:
        """int16 [rows, vocab], a copy, for int64 slots [rows]."""
        return self._marks.index_select(0, slots)

    def _grow(self) -> None:
        """Doubles the slots. Slots keep their numbers."""
        slots = self._marks.shape[0]
        self._free.extend(range(2 * slots - 1, slots - 1, -1))
        self._marks = torch.cat([self._marks, torch.zeros_like(self._marks)])


def penalised(logits: Tensor, marks: Tensor, penalties: Penalties) -> Tensor:
    """Logits with the penalties; float32 [rows, vocab] and int16 [rows, vocab].

    Repetition as in CTRL (Keskar et al. 2019): for tokens in prompt or output, positive logits are divided by the
    penalty and negative ones multiplied. Then frequency is subtracted for each time that the output has the token, and
    presence once; vLLM has the same order. A row with penalties 1, 0 and 0 comes out bit for bit as it went in.
    """
    repeated = torch.where(logits < 0, logits * penalties.repetition, logits / penalties.repetition)
    logits = torch.where(marks > 0, repeated, logits)
    if penalties.frequency is not None:
        logits = logits - penalties.frequency * (marks // GENERATED)
    return logits - penalties.presence * (marks >= GENERATED)
