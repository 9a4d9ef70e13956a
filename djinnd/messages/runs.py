"""Runs: what a session is extended by, the tokens that steps give, and the one word at the end."""

from __future__ import annotations

import msgspec

from djinn_client.image import Dtype
from djinn_client.points import Point
from djinn_client.protocol import FinishReason, Logprobs, Sampling
from djinnd.core.stops import Stop

# --- server to engine -----------------------------------------------------------------------------------------------


class Grammar(msgspec.Struct, array_like=True):
    """What a run's output follows, as llguidance reads it. With the Run comes the model's open tokenizer.json, or, of
    models that are not configured, a table of tokens (djinnd/text/grammar.py)."""

    text: str
    tokenizer: int  # a number: those with the same one are the same
    is_table: bool
    eos: list[int]
    fd: int = -1  # at the receiver, which owns it


class Run(msgspec.Struct, tag="run"):
    """Extends the session by `tokens` and generates up to `max_tokens`. `logits`: answers with their logits. A
    Run that an earlier engine had begun names its `first` position and brings no tokens: the session has them already,
    and the last `given` of them were generated."""

    request: int
    session: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling  # with a seed
    stop_tokens: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits: bool = False
    expected_tokens: int = 0  # 0: nobody knows
    deadline: float = 0.0  # CLOCK_MONOTONIC, the same in every process; 0: none
    capture: list[Point] = []  # see Capture
    stops: list[Stop] = []  # of positions that the call is about, and that have not stopped there yet
    resume_block: int | None = None  # goes on from where the last Run stopped, before that block, or does that over
    first: int | None = None  # length of the session before the Run, where that was not now
    given: int = 0
    grammar: Grammar | None = None


class CancelRun(msgspec.Struct, tag="cancel"):
    """One-way; the Run is answered by Finished(cancelled), unless it has been answered already."""

    request: int


class Halt(msgspec.Struct, tag="halt"):
    """One-way: a stop string was found. Ends the Run with `stop` after its first `keep` generated tokens."""

    request: int
    keep: int


class Hold(msgspec.Struct, tag="hold"):
    """One-way: the client reads too slowly (or again fast enough)."""

    request: int
    held: bool


# --- engine to server -----------------------------------------------------------------------------------------------


class Token(msgspec.Struct, array_like=True):
    request: int
    token: int
    logprobs: Logprobs | None = None


class Started(msgspec.Struct, array_like=True):
    """The request's first row is in this step."""

    request: int
    at: float  # CLOCK_MONOTONIC, the same in every process
    woken: bool = False  # the session's KV had left the device since it last had a row


class Stepping(msgspec.Struct, tag="stepping"):
    """The requests that a step starts: when the device has the step, or is done with it, and before what it gave."""

    started: list[Started]


class Stepped(msgspec.Struct, tag="stepped"):
    """One a step: every token that it gave, in the order of its rows."""

    tokens: list[Token]


class Recomputed(msgspec.Struct, tag="recomputed"):
    """A step has computed tokens again that their sessions had before the request: by tenant, how many. A tenant has
    been charged for what its requests bring and generate, and is charged for this, too."""

    tokens: dict[int, int]


class Capture(msgspec.Struct, frozen=True):
    """What the sealed memfd has that comes with the frame: for each point of the Run's `capture`, in their order, from
    its offset on, `room` rows of the point's width and the dtype, row-major; the first `positions` of them are the
    activations at the session's positions from `first` on."""

    dtype: Dtype
    first: int
    positions: int
    room: int
    nbytes: int  # of the window
    offsets: list[int]  # bytes


class Finished(msgspec.Struct, tag="finished"):
    """Final reply of a Run. `length` is the session's; `generated` counts the tokens that stay."""

    request: int
    reason: FinishReason
    length: int
    generated: int
    computed: int
    capture: Capture | None = None  # where it stopped: of the point between blocks where it did
    stopped: int | None = None  # reason "breakpoint": before which block


class PromptScored(msgspec.Struct, tag="prompt_scored"):
    """Before the first token of a Run with `prompt_logprobs`: of the next so many tokens of its prompt, what
    djinn_client's PromptLogprobs has of them."""

    request: int
    tokens: int
    values: bytes
    ids: bytes


class LogitsReady(msgspec.Struct, tag="logits"):
    """Final reply of a Run with `logits`: float32 [tokens, vocab] in the sealed memfd that comes with this frame."""

    request: int
    length: int
    computed: int
    tokens: int
    vocab: int
