"""A request: what one call asks of one session.

    QUEUED ──start──► RUNNING ──finish──► DONE
      │                │  ▲
      │               hold release
      │                ▼  │
      └──finish──►    HELD ──finish──► DONE

That is its life; nothing else moves it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from djinn_client.points import Point
from djinn_client.protocol import FinishReason, Sampling
from djinnd.core.edits import FOREVER
from djinnd.core.stops import Stop


class RequestState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"  # its client reads too slowly, or its grammar is being followed: no row until it is released
    DONE = "done"


_MOVES = {
    ("start", RequestState.QUEUED): RequestState.RUNNING,
    ("hold", RequestState.QUEUED): RequestState.HELD,
    ("hold", RequestState.RUNNING): RequestState.HELD,
    ("release", RequestState.HELD): RequestState.RUNNING,
    ("finish", RequestState.QUEUED): RequestState.DONE,
    ("finish", RequestState.RUNNING): RequestState.DONE,
    ("finish", RequestState.HELD): RequestState.DONE,
}


@dataclass(slots=True, eq=False)
class Request:
    """`max_tokens` 0 asks for no new token. `first` is the session's length before this request and `prompt_end` its
    length with the prompt; generated tokens follow. `logits`: of a forward pass, those of the prompt are wanted.
    `prompt_logprobs`: what the logits from `seen_from` on say of the prompt's tokens is wanted.
    `capture`: activations at these points. `seen_from`: the first position of which more is wanted than KV, and has not
    been computed yet; FOREVER where there is none. `stops`: where it stops inside the model, and ends with that.
    `resume_block`: goes on from where the last one stopped, before that block; without a prompt."""

    id: int
    first: int
    prompt_end: int
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits: bool = False
    capture: tuple[Point, ...] = ()
    seen_from: int = FOREVER
    stops: tuple[Stop, ...] = ()
    resume_block: int | None = None
    expected_tokens: int = 0  # that are likely to be generated; 0: nobody knows
    deadline: float = math.inf  # by which the last token is wanted, on the engine's clock
    state: RequestState = RequestState.QUEUED
    holders: set[str] = field(default_factory=set)  # that keep it from having a row; it is HELD while there is one
    computed: int = 0  # tokens that the model ran for the prompt
    finish_reason: FinishReason | None = None
    stopped: Stop | None = None  # with the finish_reason "breakpoint"

    def move(self, event: str) -> None:
        """Raises KeyError (our fault) for a move that the table does not have."""
        self.state = _MOVES[event, self.state]

    @property
    def tells(self) -> bool:
        """Logits of its prompt are wanted, or what they say."""
        return self.logits or self.prompt_logprobs is not None

    @property
    def runnable(self) -> bool:
        return self.state in (RequestState.QUEUED, RequestState.RUNNING)
