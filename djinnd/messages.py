"""What server and engine say to each other over their socket pair: typed structs in the frames of the wire protocol.

The server numbers requests (unique in the daemon, not the client's ids). For each `Run` the engine sends `Token`s in
`Stepped` and then exactly one `Finished`, `LogitsReady` or `Failed`; for each other message with a `request`, exactly
one final reply. A message without a `request` is one-way.

Loading asks for shared memory in mid-way: only the engine knows the layout, and only the server creates the arena.

    server ──Load──► engine ──NeedArena──► server ──ArenaReady──► engine ──Loading…──► Loaded
                                                └──ArenaRefused──► engine ──► Failed

A model that a client shares is laid out before it is loaded: DescribeImage, ImageDescribed. Its ArenaReady brings the
client's image, a descriptor that travels with the frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from djinn_client.errors import ProtocolError
from djinn_client.image import Dtype, Image
from djinn_client.placing import ModelPlan, Placing
from djinn_client.points import Point
from djinn_client.protocol import (
    Class,
    FinishReason,
    Logprobs,
    ModelInfo,
    Sampling,
    Span,
    Tier,
    framed,
)
from djinnd.core.edits import FOREVER, Edit
from djinnd.core.stops import Stop

Holding = Literal["weights", "pages"]

# --- server to engine -----------------------------------------------------------------------------------------------


class Load(msgspec.Struct, tag="load"):
    request: int
    model: str
    path: str
    kv_bytes: int = 0  # 0: the engine decides
    host_kv_bytes: int | None = None  # of pages in host memory; None: the engine decides
    disk_kv_bytes: int | None = None  # of pages in files, likewise
    disk_folder: str = ""  # for those files; "": there are none
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_context: int = 0  # 0: the model's own
    placing: Placing = Placing()
    shared: Dtype | None = None  # the dtype that a client has given its weights in; None: they are in the checkpoint


class ArenaReady(msgspec.Struct, tag="arena_ready"):
    """`complete`: an earlier engine, or a client, filled it with the same fingerprint; nothing need be read from disk.

    Of a model that a client shares there is no name but a descriptor, which is the receiver's: `fd` is its number."""

    request: int
    name: str
    offset: int  # bytes of header before the first block
    complete: bool
    fd: int = -1


class ArenaRefused(msgspec.Struct, tag="arena_refused"):
    request: int
    message: str
    data: dict[str, Any] = {}


class Plan(msgspec.Struct, tag="plan"):
    """What a Load with these fields would come to, in a budget of `memory_bytes`. Answered by Planned or Failed."""

    request: int
    model: str
    path: str
    dtype: str = "auto"
    kv_bytes: int = 0  # 0: the engine decides
    max_context: int = 0  # 0: the model's own
    placing: Placing = Placing()
    memory_bytes: int = 0  # 0: the engine's budget
    shared: Dtype | None = None  # as in Load


class DescribeImage(msgspec.Struct, tag="describe_image"):
    """How the weights of a model are to lie that a Load with these fields finds complete. Answered by ImageDescribed or
    Failed."""

    request: int
    model: str
    path: str
    dtype: str
    placing: Placing
    shared: Dtype


class SetBudget(msgspec.Struct, tag="set_budget"):
    """Answered by BudgetSet when blocks and pages are where the new budget has them, or by Failed, and then nothing has
    changed: `out_of_memory` with the figure that it could go down to."""

    request: int
    memory_bytes: int


class Trace(msgspec.Struct, tag="trace"):
    """Answered by Traced when the next `steps` steps have been recorded, or after `seconds` with what there is then; by
    Failed(retry) where one is being recorded already."""

    request: int
    steps: int
    seconds: float


class Unload(msgspec.Struct, tag="unload"):
    """`keep_pages`: the model only goes to sleep. Its sessions, which are idle, are closed in the engine, and it is
    answered when their pages are on the host, as far as that has room, for the next Load of the model to find; else the
    server has closed them before."""

    request: int
    model: str
    keep_pages: bool = False


class Open(msgspec.Struct, tag="open"):
    """One-way. With tokens: a session of an earlier engine, whose KV is computed anew when it next runs; `paused`: when
    it is resumed."""

    session: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int] = []
    paused: bool = False
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER  # see Session


class Fork(msgspec.Struct, tag="fork"):
    """One-way: opens a session with the tokens and the KV of `parent`, which is idle."""

    session: str
    parent: str
    priority: Class


class Close(msgspec.Struct, tag="close"):
    """One-way. A request that still runs ends with Finished(cancelled)."""

    session: str


class Run(msgspec.Struct, tag="run"):
    """Extends the session by `tokens` and generates up to `max_tokens`. `logits`: answers with their logits."""

    request: int
    session: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling  # with a seed
    stop_tokens: list[int] = []
    logprobs: int | None = None
    logits: bool = False
    expected_tokens: int = 0  # 0: nobody knows
    deadline: float = 0.0  # CLOCK_MONOTONIC, the same in every process; 0: none
    capture: list[Point] = []  # see Capture
    stops: list[Stop] = []  # of positions that the call is about, and that have not stopped there yet
    resume_block: int | None = None  # goes on from where the last Run stopped, before that block, or does that over


class AddEdit(msgspec.Struct, tag="add_edit"):
    """One-way. The session is idle."""

    session: str
    edit: Edit


class EndEdits(msgspec.Struct, tag="end_edits"):
    """One-way, likewise: from position `at` on these change nothing."""

    session: str
    edits: list[int]
    at: int


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


class Truncate(msgspec.Struct, tag="truncate"):
    """One-way; the session is idle."""

    session: str
    length: int


class ExportKv(msgspec.Struct, tag="export_kv"):
    """The session is idle. Answered by KvExported, or by Failed. What of its KV is not there is computed first, which
    CancelRun breaks off."""

    request: int
    session: str


class ImportKv(msgspec.Struct, tag="import_kv"):
    """Opens a session with these tokens, and with the KV of the first `kv_tokens` of them in the client's window, whose
    descriptor travels with the frame and is the receiver's: `fd` is its number. Answered by Finished when it is on the
    device, or by Failed, and then the session is open and has none.

    `salt` sets its pages apart from what others of its tenant have with the same tokens."""

    request: int
    session: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int]
    kv_tokens: int
    salt: bytes
    fd: int = -1


class Signal(msgspec.Struct, tag="signal"):
    """One-way: what the session's client does next. `waits`: for something else, `expected_s` long if it is known
    (0: not), so that its pages may leave the device as soon as nothing runs on it; else it will compute in a moment,
    and `bulk` says whether the time between its tokens matters no more than anybody's."""

    session: str
    waits: bool
    expected_s: float = 0.0
    tool: str = ""  # that it waits for
    bulk: bool | None = None  # None: as it was


class Pause(msgspec.Struct, tag="pause"):
    """The session gets no row until Resume, and its pages leave the device for `tier`. Answered by Paused when they are
    there, or by Failed, and then it runs on."""

    request: int
    session: str
    tier: Tier


class Resume(msgspec.Struct, tag="resume"):
    """One-way. A session that is not paused stays as it is."""

    session: str


class SetClass(msgspec.Struct, tag="set_class"):
    """One-way: the session has this class from now on, and the request that runs on it, too."""

    session: str
    priority: Class


class TenantLimits(msgspec.Struct, frozen=True):
    """`weight`: of the tenant's share of device time. Bytes of pages in each tier; None: no limit."""

    tenant: int
    weight: float = 1.0
    device_kv: int | None = None
    host_kv: int | None = None
    disk_kv: int | None = None


class SetTenants(msgspec.Struct, tag="set_tenants"):
    """One-way: these tenants have these limits from now on; who is not named keeps what it had, and at first has
    none."""

    tenants: list[TenantLimits]


class SetPolicy(msgspec.Struct, tag="set_policy"):
    """One-way: see config.Scheduling. Seconds."""

    slowdown: float
    between_tokens: float
    ageing: float


class Explain(msgspec.Struct, tag="explain"):
    """Answered by Explained, or by Failed(session_not_found)."""

    request: int
    session: str


class PublicPrefix(msgspec.Struct, tag="public_prefix"):
    """One-way, of a model that is loaded: sessions of all tenants that begin with these tokens share the full pages of
    them from now on."""

    model: str
    tokens: list[int]


class Inquire(msgspec.Struct, tag="inquire"):
    request: int
    check: bool = False


class Shutdown(msgspec.Struct, tag="shutdown"):
    """One-way: the engine ends its step and exits 0. `keep_pages`: the next engine is to find the pages of sessions on
    the host or on disk, as far as these have room."""

    keep_pages: bool = False


ToEngine = (
    Load
    | ArenaReady
    | ArenaRefused
    | Plan
    | DescribeImage
    | SetBudget
    | Trace
    | Unload
    | Open
    | Fork
    | Close
    | Run
    | AddEdit
    | EndEdits
    | CancelRun
    | Halt
    | Hold
    | Truncate
    | ExportKv
    | ImportKv
    | Signal
    | Pause
    | Resume
    | SetClass
    | SetTenants
    | SetPolicy
    | Explain
    | PublicPrefix
    | Inquire
    | Shutdown
)

# --- engine to server -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    """First message of an engine: the device is there."""

    device: str
    description: str
    budget_bytes: int
    pid: int


class NeedArena(msgspec.Struct, tag="need_arena"):
    """`holds`: the model's weights, or pages of its sessions."""

    request: int
    model: str
    nbytes: int
    fingerprint: str  # of checkpoint and layout
    holds: Holding = "weights"


class ArenaFilled(msgspec.Struct, tag="arena_filled"):
    """One-way: all blocks are in the arena; the server marks it complete."""

    model: str


class HostReleased(msgspec.Struct, tag="host_released"):
    """One-way: no block of the model needs the arena any more, and it is not mapped. The server removes the object; a
    later engine gets an empty one."""

    model: str


class Loading(msgspec.Struct, tag="loading"):
    """One-way: progress of a Load."""

    model: str
    stage: str
    done: int = 0
    total: int = 0


class Loaded(msgspec.Struct, tag="loaded"):
    request: int
    model: ModelInfo


class Planned(msgspec.Struct, tag="planned"):
    request: int
    plan: ModelPlan


class ImageDescribed(msgspec.Struct, tag="image_described"):
    request: int
    image: Image


class BudgetSet(msgspec.Struct, tag="budget_set"):
    request: int
    budget_bytes: int
    used_bytes: int
    seconds: float  # that the change took
    models: list[ModelInfo]


class Traced(msgspec.Struct, tag="traced"):
    request: int
    spans: list[Span]


class Unloaded(msgspec.Struct, tag="unloaded"):
    request: int


class Paused(msgspec.Struct, tag="paused"):
    request: int
    pages: int  # that the session has in the tier
    nbytes: int
    seconds: float


class Explained(msgspec.Struct, tag="explained"):
    """`ahead`: sessions of the model that are served before this one, the first of them first."""

    request: int
    state: str
    reason: str
    figures: dict[str, int | float | str]
    ahead: list[str]


class TenantUse(msgspec.Struct, array_like=True):
    """Bytes of pages that the tenant has in each tier, of all models."""

    tenant: int
    device_kv: int
    host_kv: int
    disk_kv: int


class Token(msgspec.Struct, array_like=True):
    request: int
    token: int
    logprobs: Logprobs | None = None


class Started(msgspec.Struct, array_like=True):
    """The request's first row was in this step."""

    request: int
    at: float  # CLOCK_MONOTONIC, the same in every process
    woken: bool = False  # the session's KV had left the device since it last had a row


class Stepped(msgspec.Struct, tag="stepped"):
    """One a step: every token that it gave, in the order of its rows, and the requests that it started."""

    tokens: list[Token] = []
    started: list[Started] = []


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


class LogitsReady(msgspec.Struct, tag="logits"):
    """Final reply of a Run with `logits`: float32 [tokens, vocab] in the sealed memfd that comes with this frame."""

    request: int
    length: int
    computed: int
    tokens: int
    vocab: int


class KvExported(msgspec.Struct, tag="kv_exported"):
    """Final reply of ExportKv: the KV of all of the session's tokens is in the sealed memfd that comes with this frame,
    in the pages of the pool."""

    request: int
    tokens: int


class Failed(msgspec.Struct, tag="failed"):
    """Final reply; `code` as in djinn_client.errors. A failed Run leaves the session as it was before it."""

    request: int
    code: str
    message: str
    data: dict[str, Any] = {}


class SessionUse(msgspec.Struct, array_like=True):
    """Pages on the device are held; those of the lower tiers are what is found there of the session's other pages."""

    session: str
    state: str  # idle, waiting, arriving, paused, or that of its request
    kv_tokens: int  # on the device
    pages: int
    host_pages: int = 0
    disk_pages: int = 0
    idle_s: float = 0.0


class Report(msgspec.Struct, tag="report"):
    request: int
    budget_bytes: int
    used_bytes: int
    steps: int
    generated_tokens: int
    running: int
    queued: int
    models: list[ModelInfo]
    sessions: list[SessionUse]
    tenants: list[TenantUse] = []
    findings: list[str] = []


class Alive(msgspec.Struct, tag="alive"):
    """One-way, at least once a second: the step loop turns. A server that hears none for long kills the engine."""

    step: int


FromEngine = (
    Ready
    | NeedArena
    | ArenaFilled
    | HostReleased
    | Loading
    | Loaded
    | Planned
    | ImageDescribed
    | BudgetSet
    | Traced
    | Unloaded
    | Paused
    | Explained
    | Stepped
    | Finished
    | LogitsReady
    | KvExported
    | Failed
    | Report
    | Alive
)

MAX_FRAME = 256 << 20

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine, fds: int = 0) -> bytes:
    return framed(_encoder.encode(message), fds)


def decode_to_engine(payload: bytes, fds: Sequence[int] = ()) -> ToEngine:
    """`fds`: the descriptors that came with the frame, which are the message's then."""
    message: ToEngine = _decode(_to_engine, payload)
    if isinstance(message, ArenaReady | ImportKv):
        (message.fd,) = fds or (-1,)
    else:
        assert not fds, message
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    message: FromEngine = _decode(_from_engine, payload)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:  # both sides are ours: a difference of versions between them
        raise ProtocolError(f"server and engine disagree: {error}") from error
