"""The daemon's replies, a struct each. djinn_client.protocol has their union and the frames."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from djinn_client.protocol.fields.breakpoints import BreakpointInfo, HitInfo
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage
from djinn_client.protocol.fields.conversations import RecordInfo
from djinn_client.protocol.fields.edits import Captured, EditInfo
from djinn_client.protocol.fields.image import Image
from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.protocol.fields.logprobs import Logprobs as Logprobs
from djinn_client.protocol.fields.logprobs import PromptLogprobs as PromptLogprobs
from djinn_client.protocol.fields.placing import ModelPlan
from djinn_client.protocol.fields.scheduling import Latency, QuotaUse, Why
from djinn_client.protocol.info import AdapterInfo, DeviceInfo, ModelInfo, PrefixInfo, SessionInfo, Tier, TokenInfo

FinishReason = Literal["length", "stop", "cancelled", "breakpoint", "not_finite"]


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    id: int


class Welcome(Reply, tag="welcome"):
    version: str  # of the daemon, as `djinnctl version` prints it
    user: int  # the caller's principal: a uid, or the number of a token's name
    admin: bool
    name: str = ""  # of the principal


class Done(Reply, tag="done"):
    """Final reply of a request that has nothing to tell."""


class Failure(Reply, tag="failure"):
    code: str
    message: str
    data: dict[str, Any] = {}


class Progress(Reply, tag="progress"):
    """Not final: how far a model's loading has come, in bytes. `total` is 0 if the stage has no measure. The client
    makes such messages itself while memory travels: `stage` is then "sending" or "receiving"."""

    model: str
    stage: str
    done: int = 0
    total: int = 0


class Piece(Reply, tag="piece"):
    """Not final: new text and its tokens. Text lags behind while a character is unfinished or a stop string may have
    begun. In a chat, `text` is content only, and `delta` has reasoning and tool calls. `token_bytes`, if asked for, has
    the bytes of the tokens here and of those that logprobs name, except for tokens of earlier pieces."""

    text: str
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    token_bytes: dict[int, bytes] = {}
    delta: ChatDelta | None = None
    notes: list[str] = []  # of the first piece: notes on every result of the model; the last reply has all


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int = 0  # the call has brought
    generated_tokens: int = 0
    session_tokens: int = 0  # in the session after the call
    computed_tokens: int = 0  # the model has run before the first generated token
    cached_tokens: int = 0  # before the first generated token whose KV was there
    guessed_tokens: int = 0  # of guesses that steps have run, with `speculation`
    kept_tokens: int = 0  # how many of these were right: each has saved a step


class Timings(msgspec.Struct, frozen=True):
    """Seconds from the daemon's receipt of the call."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class Generated(Reply, tag="generated"):
    """Final reply of Generate. With `stream`, text and tokens hold only what no Piece has brought. With `captured`, a
    memfd comes with it, sealed against shrinking and growing. The finish reason "not_finite" means that edits of the
    session have led to logits with NaN or infinities, so that no token could be chosen."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[Logprobs] = []
    stopped_by: str = ""  # the stop string that ended the output; "": none did
    delta: ChatDelta | None = None  # of a chat: reasoning and tool calls that no Piece has brought
    message: ChatMessage | None = None  # of a chat: the whole answer, also with `stream`
    captured: Captured | None = None  # the form of captured activations; with a `hit`, those of `hit.point`
    hit: HitInfo | None = None  # finish_reason "breakpoint"
    token_bytes: dict[int, bytes] = {}  # see Piece; with prompt_logprobs also of the prompt's tokens
    notes: list[str] = []  # for the caller to read
    prompt_logprobs: PromptLogprobs | None = None  # if asked for; None if the call was cancelled before
    session: str = ""  # the session that the daemon has chosen for a call with a conversation

    @property
    def choices(self) -> list[Generated]:
        """All outputs of the call; a call with n has several (see djinn_client.session.choices)."""
        return [self]


class BreakpointAdded(Reply, tag="breakpoint_added"):
    breakpoint: int


class Breakpoints(Reply, tag="breakpoint_list"):
    breakpoints: list[BreakpointInfo]


class EditAdded(Reply, tag="edit_added"):
    edit: int


class Edits(Reply, tag="edit_list"):
    edits: list[EditInfo]


class RecordKept(Reply, tag="record_kept"):
    record: str


class Record(Reply, tag="record"):
    record: str
    model: str
    session: str
    length: int
    created: float
    body: bytes


class Records(Reply, tag="record_list"):
    records: list[RecordInfo]


class Embedded(Reply, tag="embedded"):
    """Final reply of Embed."""

    vectors: bytes  # float32, little-endian: a row of `width` numbers for each input
    width: int
    tokens: list[int]  # of each input
    pooling: str


class Logits(Reply, tag="logits"):
    """Final reply of Forward: float32 [tokens, vocab], row-major, in the memfd that travels with this frame (sealed
    against shrinking and growing), or in `inline` for a peer that takes no descriptors."""

    tokens: int
    vocab: int
    timings: Timings
    inline: bytes | None = None


class SessionOpened(Reply, tag="session"):
    session: SessionInfo


class PauseReply(Reply, tag="paused"):
    """Final reply of PauseSession: the pages that the session has in the tier now, and how long moving them took."""

    tier: Tier
    pages: int
    nbytes: int
    seconds: float


class WhyReply(Reply, tag="why_reply"):
    """Final reply of ExplainSession."""

    why: Why


class Quotas(Reply, tag="quota_list"):
    quotas: list[QuotaUse]


class PrefixPublished(Reply, tag="prefix_published"):
    prefix: PrefixInfo


class Prefixes(Reply, tag="prefix_list"):
    prefixes: list[PrefixInfo]


class PrefixWithdrawn(Reply, tag="prefix_withdrawn"):
    """`in_force`: the model is loaded, and its sessions share the prefix until it is loaded the next time."""

    in_force: bool


class TokenAdded(Reply, tag="token_added"):
    """The only reply with the `token` itself: the daemon keeps only its SHA-256."""

    token: str
    info: TokenInfo


class TokensListed(Reply, tag="tokens_listed"):
    tokens: list[TokenInfo]


class TokenIds(Reply, tag="token_ids"):
    token_ids: list[int]


class Tokenized(Reply, tag="tokenized"):
    """Final reply of Tokenize."""

    token_ids: list[int]
    token_texts: list[str] = []  # if asked for, as the tokenizer's vocabulary spells them


class Detokenized(Reply, tag="detokenized"):
    """Final reply of Detokenize."""

    text: str


class TokenizerInfo(Reply, tag="tokenizer_info"):
    """Final reply of DescribeTokenizer. A token is given as text, "" if the checkpoint names none."""

    has_text: bool  # the checkpoint has a tokenizer
    has_chat: bool  # it has a chat template
    bos_token: str = ""
    eos_token: str = ""
    eos_ids: list[int] = []  # tokens that end an output
    chat_template: str = ""  # for chats without tools
    config: bytes = b""  # the checkpoint's config.json; empty if it is large, like the next
    generation_config: bytes = b""  # empty also if the checkpoint has none


class SessionExported(Reply, tag="exported"):
    """Final reply of ExportSession. With `kv`, a memfd comes with it that has the KV of the first `kv_tokens` tokens in
    this form, sealed against shrinking and growing."""

    token_ids: list[int]
    fingerprint: str  # of the model
    kv: KvLayout | None = None
    kv_tokens: int = 0


class Sessions(Reply, tag="session_list"):
    sessions: list[SessionInfo]


class ModelReply(Reply, tag="model"):
    model: ModelInfo


class FilesHandedOver(Reply, tag="files_handed_over"):
    """`model` is the name of the model, or of the adapter, that has these files; requests use it instead of the
    folder's."""

    model: str


class Adapters(Reply, tag="adapters"):
    adapters: list[AdapterInfo]


class AdapterReply(Reply, tag="adapter"):
    adapter: AdapterInfo


class ShareDescribed(Reply, tag="share_described"):
    share: str
    model: str
    image: Image
    ready: ModelInfo | None = None  # the daemon has the weights already, and wants none


class PlanReply(Reply, tag="plan_reply"):
    plan: ModelPlan


class BudgetReply(Reply, tag="budget_reply"):
    """Final reply of SetBudget; `seconds` is how long the change took."""

    budget_bytes: int
    used_bytes: int
    seconds: float
    models: list[ModelInfo]


class Models(Reply, tag="model_list"):
    models: list[ModelInfo]


class StatusReply(Reply, tag="status_reply"):
    version: str
    pid: int
    uptime_s: float
    address: str
    state: str  # starting, ready, draining
    devices: list[DeviceInfo]
    models: list[ModelInfo]
    sessions: dict[str, int]  # by class
    requests_running: int
    requests_queued: int
    connections: int
    arena_bytes: int  # POSIX shared memory that the daemon holds
    latency: dict[str, Latency] = {}  # by class, since the daemon began
    guessed_tokens: int = 0  # of the caller's calls, or of all calls for an administrator: see Usage
    kept_tokens: int = 0
    integrity: list[str] = []  # findings of the check, if one was asked for
    notes: list[str] = []  # for administrators to read


class Span(msgspec.Struct, frozen=True):
    """A stretch of a device's work. The spans of one track follow each other.

    track       its spans                                             their args
    step        `step`                                                model, rows, tokens that the rows bring
    compute     `prologue`, `block N` with its decoding, `epilogue`   of a block: place (plain, packed or streamed)
                `masks`, for as long as they are waited for
    cpu         `MLP of N rows`, computed by the host
    copy        `block N`, a piece of it, queued in one of the steps  bytes
    pages up    `promote N`, a copy of N neighbouring pages           bytes
    pages down  `demote N`, likewise                                  bytes
    """

    track: str
    name: str
    start_us: float  # since the first span began
    duration_us: float
    args: dict[str, Any] = {}


class TraceReply(Reply, tag="trace_reply"):
    """Final reply of GetTrace: the spans, by time. The list is empty if nothing ran."""

    device: str
    spans: list[Span]
