"""A request: one call on one session.

    QUEUED ──start──► RUNNING ──finish──► DONE
      │                │  ▲
      │               hold release
      │                ▼  │
      └──finish──►    HELD ──finish──► DONE

These are all of its states and transitions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from djinn_client.protocol import FinishReason, Sampling
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import FOREVER
from djinnd.core.stops import Stop


class RequestState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"  # its client reads too slowly, or its grammar has to catch up: it gets no row until it is released
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
    """`first` is the session's length before this request, and `prompt_end` its length with the prompt; generated
    tokens follow. With `max_tokens` 0, the request generates nothing.

    `logits`: logits of the prompt's positions are wanted, for a forward pass. `prompt_logprobs`: log probabilities of
    the prompt's tokens are wanted, from the logits of position `seen_from` on. `capture`: activations at these points
    are wanted.

    `seen_from`: the first position that has to be run because more than its KV is wanted; FOREVER if there is none.
    `stops`: breakpoints inside the model; the request ends at the first one that it reaches. `resume_block`: the
    request has no prompt and continues before this block, where the last request stopped.

    `may_guess`: steps may run guesses of its next tokens (Row.guess).
    """

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
    may_guess: bool = False
    expected_tokens: int = 0  # how many tokens are likely to be generated; 0: unknown
    deadline: float = math.inf  # when the last token is wanted, in seconds on the engine's clock
    between_tokens: float | None = None  # target in seconds; inf: none; None: that of the session's class
    first_token: float | None = None  # likewise
    state: RequestState = RequestState.QUEUED
    holders: set[str] = field(default_factory=set)  # reasons why it gets no row; it is HELD while there is one
    computed: int = 0  # prompt tokens that the model has run for it
    guessed: int = 0  # tokens of guesses that steps have run for it
    kept: int = 0  # how many of these were right
    finish_reason: FinishReason | None = None
    stopped: Stop | None = None  # where it stopped, if finish_reason is "breakpoint"

    @property
    def has_target(self) -> bool:
        return self.between_tokens is not None or self.first_token is not None

    def move(self, event: str) -> None:
        """Raises KeyError, which is a bug of ours, if the table has no such transition."""
        self.state = _MOVES[event, self.state]

    @property
    def wants_prompt_logits(self) -> bool:
        """True if the client wants logits of the prompt, or log probabilities of its tokens."""
        return self.logits or self.prompt_logprobs is not None

    @property
    def runnable(self) -> bool:
        """True if it is neither held nor done."""
        return self.state in (RequestState.QUEUED, RequestState.RUNNING)
