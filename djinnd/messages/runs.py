"""Messages about runs: a request that extends a session, the tokens that steps give it, and its final reply."""

from __future__ import annotations

import msgspec

from djinn_client.protocol import FinishReason, Logprobs, Sampling
from djinn_client.protocol.fields.image import Dtype
from djinn_client.protocol.fields.points import Point
from djinnd.core.stops import Stop
from djinnd.messages.directions import FromEngine, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class Grammar(msgspec.Struct, array_like=True):
    """The grammar that a run's output follows, as llguidance reads it. The Run's frame carries a descriptor: the
    model's tokenizer.json, or a table of tokens if the model is not configured (djinnd/text/grammar.py)."""

    text: str
    tokenizer: int  # equal numbers mean the same tokenizer
    is_table: bool
    eos: list[int]
    fd: int = -1  # the receiver owns it


class Run(ToEngine, tag="run"):
    """Extends the session by `tokens` and generates up to `max_tokens`. With `logits`, the reply has the logits of
    `tokens`.

    A Run that an earlier engine began names its `first` position and brings no tokens. The session has them already,
    and the last `given` of them were generated.
    """

    request: int
    session: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling  # has a seed
    stop_tokens: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits: bool = False
    expected_tokens: int = 0  # 0: unknown
    between_tokens: float | None = None  # target in seconds; 0: none; None: that of the session's class
    first_token: float | None = None  # likewise
    deadline: float = 0.0  # CLOCK_MONOTONIC, the same in every process; 0: none
    capture: list[Point] = []  # see CaptureLayout
    stops: list[Stop] = []  # breakpoints at this call's positions that have not been reached yet
    # The last Run stopped before this block. This Run continues there, or repeats the pass if that state is lost.
    resume_block: int | None = None
    first: int | None = None  # the session's length before the Run; None: its length now
    given: int = 0
    grammar: Grammar | None = None


class CancelRun(ToEngine, tag="cancel"):
    """One-way; the Run is answered by Finished(cancelled), unless it has had its final reply."""

    request: int


class Halt(ToEngine, tag="halt"):
    """One-way: the server found a stop string. Ends the Run with reason `stop` after its first `keep` generated
    tokens."""

    request: int
    keep: int


class Hold(ToEngine, tag="hold"):
    """One-way. `held`: True stops the Run while its client reads too slowly, False lets it go on."""

    request: int
    held: bool


# --- engine to server -----------------------------------------------------------------------------------------------


class Token(msgspec.Struct, array_like=True):
    request: int
    token: int
    logprobs: Logprobs | None = None


class Started(msgspec.Struct, array_like=True):
    """This step has the request's first row."""

    request: int
    at: float  # CLOCK_MONOTONIC, the same in every process
    woken: bool = False  # the session's KV has been away from the device since its last row


class Stepping(FromEngine, tag="stepping"):
    """The requests whose first row is in this step. Sent while the device runs the step, or just after, and always
    before the step's tokens."""

    started: list[Started]


class Stepped(FromEngine, tag="stepped"):
    """Sent once a step: all its tokens, in the order of its rows."""

    tokens: list[Token]


class Recomputed(FromEngine, tag="recomputed"):
    """A step has computed again tokens that were in their sessions before the request. `tokens`: how many, by tenant;
    the server charges them to the tenant, beside the tokens that its requests bring and generate."""

    tokens: dict[int, int]


class GrammarTime(FromEngine, tag="grammar_time"):
    """The CPU seconds that grammar processes have used since the last such message, by tenant. The server charges
    them."""

    seconds: dict[int, float]


class CaptureLayout(msgspec.Struct, frozen=True):
    """Layout of the sealed memfd that comes with the frame. Each point of the Run's `capture`, in their order, has an
    array [room, width of the point] of the dtype, row-major, at its offset. The first `positions` rows hold the
    activations at the session's positions from `first` on."""

    dtype: Dtype
    first: int
    positions: int
    room: int
    nbytes: int  # of the window
    offsets: list[int]  # bytes


class Finished(FromEngine, tag="finished"):
    """Final reply of a Run. `length`: of the session. `generated`: the generated tokens that stay in it. `guessed`,
    `kept`: see Usage."""

    request: int
    reason: FinishReason
    length: int
    generated: int
    computed: int
    capture: CaptureLayout | None = None  # at a breakpoint between blocks, it has that point
    stopped: int | None = None  # with reason "breakpoint": the block before which the Run stopped
    guessed: int = 0
    kept: int = 0


class PromptScored(FromEngine, tag="prompt_scored"):
    """Sent before the first token of a Run with `prompt_logprobs`, once for each part of its prompt. `values` and `ids`
    are as in djinn_client's PromptLogprobs, for the next `tokens` tokens of the prompt."""

    request: int
    tokens: int
    values: bytes
    ids: bytes


class LogitsReady(FromEngine, tag="logits"):
    """Final reply of a Run with `logits`: float32 [tokens, vocab] in the sealed memfd that comes with the frame."""

    request: int
    tokens: int
    vocab: int
