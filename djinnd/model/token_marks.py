"""Which tokens a session holds, kept on the device for the requests that use penalties.

    marks   uint8 [slots, vocab]     0: not there   SEEN: in the prompt   SEEN | GENERATED: in the output

Slot 0 stays blank and stands for every request without penalties. A request owns its slot from the first `follow` that
names its session until `forget`.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class _Entry:
    slot: int
    covered: int  # tokens of the session that are marked


class TokenMarks:
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.device = device
        self._vocab = vocab
        self._marks = torch.zeros(1, vocab, dtype=torch.uint8, device=device)
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
        self._mark(prompt, SEEN)  # first: an output mark holds both bits and must not be overwritten
        self._mark(output, SEEN | GENERATED)

    def rows(self, slots: Tensor) -> Tensor:
        """uint8 [rows, vocab], a copy, for int64 slots [rows]."""
        return self._marks.index_select(0, slots)

    def _mark(self, places: list[int], value: int) -> None:
        if places:
            self._marks.view(-1).index_fill_(0, upload(places, torch.int64, self.device), value)

    def _grow(self) -> None:
        """Doubles the slots. Slots keep their numbers."""
        slots = self._marks.shape[0]
        self._free.extend(range(2 * slots - 1, slots - 1, -1))
        self._marks = torch.cat([self._marks, torch.zeros_like(self._marks)])


def penalised(logits: Tensor, marks: Tensor, repetition: Tensor, presence: Tensor) -> Tensor:
    """Logits with both penalties; float32 [rows, vocab] and uint8 [rows, vocab], penalties float32 [rows, 1].

    Repetition as in CTRL (Keskar et al. 2019): for tokens in prompt or output, positive logits are divided by the
    penalty and negative ones multiplied. Then presence is subtracted for those in the output; vLLM has the same order.
    A row with penalties 1 and 0 comes out bit for bit as it went in.
    """
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    return torch.where(marks > 0, repeated, logits) - presence * (marks > SEEN)
