"""The wire contract: frames and messages, without any I/O. Both clients, the server and the fuzzer use this module.

A connection is a stream of frames in both directions:

    byte 0      2         3      4             8
         ┌──────┬─────────┬──────┬─────────────┬──────────────────────────┐
         │ "DJ" │ version │ fds  │ length (BE) │ payload: msgpack, typed  │
         └──────┴─────────┴──────┴─────────────┴──────────────────────────┘

`fds` says how many file descriptors travel with the frame (SCM_RIGHTS with the frame's first byte; never more than
MAX_FDS). The first frame of a client is `Hello`. Every request carries an `id` chosen by the client; the server answers
it with any number of `Progress` and `Piece` frames and then exactly one final reply: a result or a `Failure`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from djinn_client.errors import FrameTooLarge, InvalidRequest, ProtocolError, VersionMismatch
from djinn_client.image import Dtype, Image
from djinn_client.kv_layout import KvLayout
from djinn_client.placing import ModelPlan as ModelPlan
from djinn_client.placing import Placing as Placing

VERSION = 1
MAGIC = b"DJ"
HEADER = struct.Struct(">2sBBI")
MAX_FDS = 4
MAX_REQUEST = 16 << 20  # bytes of a frame that a client may send
MAX_REPLY = 256 << 20  # bytes of a frame that a server may send

T = TypeVar("T")

Class = Literal["interactive", "agent", "batch"]
CLASSES: tuple[Class, ...] = ("interactive", "agent", "batch")
FinishReason = Literal["length", "stop", "cancelled"]
Tier = Literal["device", "host", "disk"]  # where a page is
SignalKind = Literal["IO_WAIT", "COMPUTE"]
SIGNAL_KINDS: tuple[SignalKind, ...] = ("IO_WAIT", "COMPUTE")
MAX_EXPECTED_S = 86400.0


class Frame(msgspec.Struct, frozen=True):
    payload: bytes
    fds: int


class FrameDecoder:
    """Bytes in, frames out. After an error the stream cannot be resynchronised: the connection must be closed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yields each frame that `data` completes.

        Raises ProtocolError when the bytes are not a frame, VersionMismatch, or FrameTooLarge as soon as the header
        that announces such a frame has come.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            magic, version, fds, length = HEADER.unpack_from(self._buffer)
            if magic != MAGIC:
                raise ProtocolError(f"these bytes are not djinnd's protocol: {bytes(self._buffer[:8])!r}")
            if version != VERSION:
                raise VersionMismatch(
                    f"the peer speaks protocol version {version}, this side speaks {VERSION}: update the older one",
                    theirs=version,
                    ours=VERSION,
                )
            if fds > MAX_FDS:
                raise ProtocolError(f"a frame announces {fds} file descriptors, the limit is {MAX_FDS}")
            if length > self.limit:
                raise FrameTooLarge(
                    f"a frame of {length:,} bytes is over the limit of {self.limit:,}", length=length, limit=self.limit
                )
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(payload, fds)

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame; more than zero at end of stream means that the frame was truncated."""
        return len(self._buffer)


# --- requests -------------------------------------------------------------------------------------------------------

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Temperature 0 is greedy; 0 or 1 switches the other limits off, as named."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # 0: off; output only
    seed: int | None = None  # None: the daemon draws one

    def validate(self) -> None:
        """Raises InvalidRequest for a value outside its range; NaN is outside every range."""
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            if math.isnan(value) or not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; it must be from {low:g} to {high:g}", field=name)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, which leaves no token; use temperature=0 for greedy", field="top_p")
        if not 0 <= self.top_k < 1 << 31:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (off) or a positive count", field="top_k")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise InvalidRequest(f"seed is {self.seed}; it must be from 0 to 2^63-1", field="seed")


class Request(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    id: int


class Hello(Request, tag="hello"):
    client: str = ""
    token: str = ""  # remote listeners only


class Ping(Request, tag="ping"):
    pass


class OpenSession(Request, tag="open"):
    model: str
    priority: Class = "interactive"


class AttachSession(Request, tag="attach"):
    session: str


class ForkSession(Request, tag="fork"):
    """Opens a session with the model, the tokens and the KV of another one of the caller's, which is idle. They go
    their own ways from there."""

    session: str
    priority: Class | None = None  # None: the other's


class CloseSession(Request, tag="close"):
    session: str


class Generate(Request, tag="generate"):
    """Extends the session by the prompt (text or token ids, or nothing to go on from where it is) and generates."""

    session: str
    text: str | None = None
    token_ids: list[TokenId] | None = None
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    stop: list[str] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's and the n likeliest
    stream: bool = False  # Pieces as they come; otherwise only the final reply


class Forward(Request, tag="forward"):
    """Extends the session by the tokens and answers with the logits of each."""

    session: str
    token_ids: list[TokenId]


class Truncate(Request, tag="truncate"):
    session: str
    length: int


class GetTokens(Request, tag="tokens"):
    session: str


class ExportSession(Request, tag="export"):
    """Answered by SessionExported. `kv`: with the KV of all its tokens; what of it is not there is computed first."""

    session: str
    kv: bool = True


class ImportSession(Request, tag="import"):
    """Opens a session that has these tokens. Answered by SessionOpened, after Progress while the model is loaded.

    With `kv`, a descriptor comes with it: a memfd with the KV of the first `kv_tokens` tokens in this form, and nothing
    else; all of its memory reserved, sealed against shrinking and growing, and against writing or future writing. Such
    a session shares no KV with others but its forks, and ends with the engine that has it: SessionLost."""

    model: str
    token_ids: list[TokenId]
    priority: Class = "interactive"
    fingerprint: str = ""  # of the model that they are of; "": any
    kv: KvLayout | None = None
    kv_tokens: int = 0


class Cancel(msgspec.Struct, tag="cancel"):
    """One-way: ends the request `target` of this connection; its final reply says `cancelled`."""

    target: int


class Signal(msgspec.Struct, tag="signal", omit_defaults=True):
    """One-way: what the session's client does next. IO_WAIT: it waits for something else, `expected_s` seconds if that
    is known (0: not), so the session's pages may leave the device; COMPUTE: it will call in a moment.

    It is advice: a daemon ignores one that it does not understand, and one for a session that it does not know."""

    session: str
    kind: str  # a SignalKind; any word decodes, so that a newer client's does no harm
    expected_s: float = 0.0

    def validate(self) -> None:
        """Raises InvalidRequest."""
        if self.kind not in SIGNAL_KINDS:
            raise InvalidRequest(f"{self.kind[:64]!r} is no signal: {' and '.join(SIGNAL_KINDS)} are", field="kind")
        if not 0.0 <= self.expected_s <= MAX_EXPECTED_S:  # NaN is neither
            limit = f"it must be from 0 (not known) to {MAX_EXPECTED_S:g} seconds, a day"
            raise InvalidRequest(f"expected_s is {self.expected_s:g}; {limit}", field="expected_s")
        if self.expected_s and self.kind != "IO_WAIT":
            raise InvalidRequest(f"{self.kind} takes no expected_s: it is of now", field="expected_s")


class PauseSession(Request, tag="pause"):
    """The session gets no step until ResumeSession, and its pages leave the device for `tier`, which is a lower one.
    Answered by PauseReply when they are there. What runs on it goes on at resume, what comes meanwhile waits."""

    session: str
    tier: Tier = "host"


class ResumeSession(Request, tag="resume"):
    """Answered by Done. A session that is not paused stays as it is."""

    session: str


class PublishPrefix(Request, tag="publish_prefix"):
    """Sessions of all users that begin with the first `tokens` tokens of this one share their pages from now on; None:
    all that it has. Answered by PrefixPublished. For administrators: see docs/sessions.md for what it tells."""

    session: str
    tokens: int | None = None


class ListPrefixes(Request, tag="prefixes"):
    """Answered by Prefixes. For administrators."""


class WithdrawPrefix(Request, tag="withdraw_prefix"):
    """Answered by PrefixWithdrawn. For administrators."""

    prefix: str


class GetStatus(Request, tag="status"):
    check: bool = False  # audit the pools too: what was found is in StatusReply.integrity


class GetTrace(Request, tag="trace"):
    """What the device does in its next `steps` steps, or in `seconds`, whichever ends first. For administrators."""

    steps: int = 4
    seconds: float = 10.0


class ListSessions(Request, tag="sessions"):
    pass


class ListModels(Request, tag="models"):
    pass


class LoadModel(Request, tag="load"):
    """Answers with Progress until the model is there. `kv_bytes` 0, and None of the others: as the daemon sees fit."""

    model: str
    kv_bytes: int = 0
    host_kv_bytes: int | None = None  # for pages in host memory; 0: none
    disk_kv_bytes: int | None = None  # for pages on disk; 0: none
    placing: Placing | None = None  # None: as configured


class PlanModel(Request, tag="plan"):
    """What loading would come to. The model may be loaded or not, and nothing about it changes."""

    model: str
    memory_bytes: int = 0  # 0: the device's budget
    kv_bytes: int = 0  # 0: as configured
    placing: Placing | None = None  # None: as configured


class UnloadModel(Request, tag="unload"):
    model: str
    force: bool = False  # closes the sessions that use it


class ShareModel(Request, tag="share"):
    """The first of two requests that hand a model over. Answered by ShareDescribed: what the daemon wants to be given.

    A descriptor comes with it: a memfd that begins with the `files` of the model, name → bytes, one after another.
    The share belongs to this connection, and ends with it, when limits.session_grace is over."""

    model: str  # "": the daemon makes a name up
    files: dict[str, int]
    stored: Dtype  # of the weights, as the client has them
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # to compute in
    kv_bytes: int = 0  # 0: as the daemon sees fit
    placing: Placing = Placing()
    public: bool = False  # other users may have sessions of it, too


class ShareWeights(Request, tag="share_weights"):
    """The second. Answers with Progress until the model is there.

    A descriptor comes with it: a memfd that is the image, sealed against shrinking, growing and writing."""

    share: str


class EndShare(Request, tag="end_share"):
    """No new session may use the model; when the last has gone, it goes. Done also where there is no such share."""

    share: str


class SetBudget(Request, tag="set_budget"):
    """Changes the device's budget while sessions run: blocks that no longer fit stream, or become resident again."""

    memory_bytes: int


class Restart(Request, tag="restart"):
    """The daemon drains and starts again as the same process. Answered by Done before it drains; sessions end with it.

    `warm`: what is in shared memory of the loaded models stays there, and they are loaded again from it."""

    warm: bool = False


ClientMessage = (
    Hello
    | Ping
    | OpenSession
    | AttachSession
    | ForkSession
    | CloseSession
    | Generate
    | Forward
    | Truncate
    | GetTokens
    | ExportSession
    | ImportSession
    | Cancel
    | Signal
    | PauseSession
    | ResumeSession
    | PublishPrefix
    | ListPrefixes
    | WithdrawPrefix
    | GetStatus
    | GetTrace
    | ListSessions
    | ListModels
    | LoadModel
    | PlanModel
    | UnloadModel
    | ShareModel
    | ShareWeights
    | EndShare
    | SetBudget
    | Restart
)

# --- replies --------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    id: int


class Welcome(Reply, tag="welcome"):
    version: str  # the daemon's, as `djinnctl version` prints it
    user: int  # the uid that the daemon knows the caller by
    admin: bool


class Done(Reply, tag="done"):
    """Final reply of a request that has nothing to tell."""


class Failure(Reply, tag="failure"):
    code: str
    message: str
    data: dict[str, Any] = {}


class Progress(Reply, tag="progress"):
    """Not final: how far a model's loading has come. `done` and `total` in bytes; 0 total where there is no measure."""

    model: str
    stage: str
    done: int = 0
    total: int = 0


class Logprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities after temperature 1 and no penalty, for one generated token."""

    token: float
    top: dict[int, float] = {}


class Piece(Reply, tag="piece"):
    """Not final: text that has come, and the tokens it came with. Text lags behind where a character is unfinished
    or a stop string may have begun."""

    text: str
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0  # that this call brought
    generated_tokens: int = 0
    session_tokens: int = 0  # in the session after the call
    computed_tokens: int = 0  # that the model ran for the prompt: less than the context where KV was kept


class Timings(msgspec.Struct, frozen=True):
    """Seconds from the daemon's receipt of the call."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class Generated(Reply, tag="generated"):
    """Final reply of Generate. With `stream`, text and tokens hold only what no Piece has brought."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[Logprobs] = []


class Logits(Reply, tag="logits"):
    """Final reply of Forward: float32 [tokens, vocab], row-major, in the memfd that travels with this frame (sealed
    against shrinking and growing), or in `inline` for a peer that takes no descriptors."""

    tokens: int
    vocab: int
    timings: Timings
    inline: bytes | None = None


class SessionInfo(msgspec.Struct, kw_only=True):
    id: str
    model: str
    priority: Class
    user: int
    state: str  # idle, waiting, arriving, paused, queued, running, held, detached
    tokens: int
    kv_tokens: int  # tokens whose KV is on the device
    pages: int  # held on the device
    host_pages: int = 0  # found on the host
    disk_pages: int = 0
    page_bytes: int = 0
    age_s: float
    idle_s: float
    attached: int  # connections
    foreign_kv: bool = False  # the KV of its beginning was a client's: see ImportSession


class SessionOpened(Reply, tag="session"):
    session: SessionInfo


class PauseReply(Reply, tag="paused"):
    """Final reply of PauseSession: the pages that the session has in the tier now, and what moving them took."""

    tier: Tier
    pages: int
    nbytes: int
    seconds: float


class PrefixInfo(msgspec.Struct, kw_only=True):
    id: str
    model: str
    tokens: int  # that are public: full pages
    user: int  # who has marked it
    created: float  # seconds since 1970


class PrefixPublished(Reply, tag="prefix_published"):
    prefix: PrefixInfo


class Prefixes(Reply, tag="prefix_list"):
    prefixes: list[PrefixInfo]


class PrefixWithdrawn(Reply, tag="prefix_withdrawn"):
    """`in_force`: the model is loaded, and goes on sharing the prefix until it is loaded the next time."""

    in_force: bool


class TokenIds(Reply, tag="token_ids"):
    token_ids: list[int]


class SessionExported(Reply, tag="exported"):
    """Final reply of ExportSession. With `kv`, a memfd comes with it that has the KV of the first `kv_tokens` tokens in
    this form, sealed against shrinking and growing."""

    token_ids: list[int]
    fingerprint: str  # of the model
    kv: KvLayout | None = None
    kv_tokens: int = 0


class Sessions(Reply, tag="session_list"):
    sessions: list[SessionInfo]


class ModelInfo(msgspec.Struct, kw_only=True):
    name: str
    path: str
    fingerprint: str = ""  # of the weights and the configuration, the same on every machine
    family: str = ""
    state: str = ""  # available, loading, ready, failed
    dtype: str = ""
    parameters: int = 0
    blocks: int = 0
    blocks_plain: int = 0  # resident as in the checkpoint
    blocks_packed: int = 0  # resident in the 12-bit code
    blocks_streamed: int = 0
    streamed_bytes: int = 0  # over the bus in one pass
    ring_bytes: int = 0  # of device memory
    scratch_bytes: int = 0  # of device memory, where packed blocks are decoded
    vocab: int = 0
    max_context: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    page_size: int = 0  # tokens
    page_bytes: int = 0
    pages: int = 0
    pages_used: int = 0
    host_pages: int = 0  # that the host tier has room for
    host_pages_used: int = 0
    disk_pages: int = 0
    disk_pages_used: int = 0
    sessions: int = 0
    error: str = ""
    notes: list[str] = []  # why blocks stay plain, and such


class ModelReply(Reply, tag="model"):
    model: ModelInfo


class ShareDescribed(Reply, tag="share_described"):
    share: str
    model: str
    image: Image


class PlanReply(Reply, tag="plan_reply"):
    plan: ModelPlan


class BudgetReply(Reply, tag="budget_reply"):
    """Final reply of SetBudget; `seconds` is what the change took."""

    budget_bytes: int
    used_bytes: int
    seconds: float
    models: list[ModelInfo]


class Models(Reply, tag="model_list"):
    models: list[ModelInfo]


class DeviceInfo(msgspec.Struct, kw_only=True):
    name: str  # "cpu", "cuda:0"
    description: str
    budget_bytes: int
    used_bytes: int
    state: str  # starting, ready, lost
    pid: int
    restarts: int = 0
    steps: int = 0
    generated_tokens: int = 0


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
    integrity: list[str] = []  # findings, where a check was asked for


class Span(msgspec.Struct, frozen=True):
    """Something that a device did. On a track one span follows another.

    track      its spans                                             their args
    step       `step`                                                model, rows, tokens that the rows bring
    compute    `prologue`, `block N` with its decoding, `epilogue`   of a block: place (plain, packed or streamed)
    copy       `block N`, a piece of it, queued in one of the steps  bytes
    """

    track: str
    name: str
    start_us: float  # since the first span began
    duration_us: float
    args: dict[str, Any] = {}


class TraceReply(Reply, tag="trace_reply"):
    """Final reply of GetTrace: spans by time. None, where nothing ran."""

    device: str
    spans: list[Span]


ServerMessage = (
    Welcome
    | Done
    | Failure
    | Progress
    | Piece
    | Generated
    | Logits
    | SessionOpened
    | PauseReply
    | PrefixPublished
    | Prefixes
    | PrefixWithdrawn
    | TokenIds
    | SessionExported
    | Sessions
    | ModelReply
    | ShareDescribed
    | PlanReply
    | BudgetReply
    | Models
    | StatusReply
    | TraceReply
)
Partial = Progress | Piece  # the replies that are not final

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


class _OnlyId(msgspec.Struct):
    id: int


_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


def encode(message: ClientMessage | ServerMessage, fds: int = 0) -> bytes:
    """One frame, header and payload."""
    payload = _encoder.encode(message)
    return HEADER.pack(MAGIC, VERSION, fds, len(payload)) + payload


def decode_request(payload: bytes) -> ClientMessage:
    """Raises ProtocolError with msgspec's account of what is wrong and where."""
    return _decode(_client_decoder, payload)


def decode_reply(payload: bytes) -> ServerMessage:
    return _decode(_server_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that this side does not understand: {error}") from error


def request_id_of(payload: bytes) -> int | None:
    """The `id` of a request that did not decode, so that its sender can be told; None where there is none."""
    try:
        return _id_decoder.decode(payload).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
