"""What can be configured. The names are the keys of djinnd.yaml; README and the example file explain them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from djinn_client.errors import InvalidRequest
from djinn_client.placing import MAX_SLOTS, Placing, ring_bytes
from djinn_client.scheduling import Class
from djinnd.config.units import (
    MAX_COUNT,
    AutoSize,
    Device,
    Gigabytes,
    Group,
    LimitCount,
    LimitRate,
    LimitSize,
    Packing,
    PathText,
    Principal,
    Resident,
    Seconds,
    Size,
    User,
)

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]

ReplyFormatName = Literal[
    "auto",
    "plain",
    "harmony",
    "gemma4",
    "functiongemma",
    "deepseek-v3",
    "deepseek-v3.1",
    "deepseek-v3.2",
    "minimax",
    "seed-oss",
    "kimi",
    "granite",
    "glm",
    "qwen3-coder",
    "lfm2",
    "hermes",
    "mistral",
    "mistral-v3",
    "llama3",
    "gemma3",
    "pythonic",
]

MAX_EDIT_BYTES = 128 << 20  # of a session: with its tokens it is one message to an engine
MAX_KEEP_ALIVE_S = 365 * 86400.0
MAX_FUNCTION_BYTES = 1 << 50  # with what the process begins with it is a limit that the kernel takes
LEAST_REQUEST_BYTES = 64 << 10  # any command of djinnctl's is smaller


class Log(Struct, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Limits(Struct, frozen=True):
    sessions: Count = 4096  # in all
    sessions_per_user: Count = 1024
    detached_per_user: Count = 256  # that nobody is attached to; the longest unused of more than that are closed
    conversations_per_user: Count = 256  # sessions that are kept for programs that know none; the longest idle go
    records_per_user: Count = 1024  # points of conversations that are kept by name; the oldest of more go
    record_bytes: Size = 4 << 20  # of the caller's, with one record
    connections_per_user: Count = 1024
    tokens: Count = 1024  # that administrators have added, in all
    shared_models_per_user: Count = 8
    downloads: Count = 8  # from the hub, in all
    downloads_per_user: Count = 2
    hub_download: Seconds = 6 * 3600  # that one may take
    files: Seconds = 30  # that a checkpoint's files may take to be opened, and its small ones to be read
    public_prefixes_per_model: Count = 256
    edits_per_session: Count = 1000
    edits_per_position: Count = 16  # at one point: they apply one after another, and all that run wait for that
    edit_bytes_per_session: Size = 64 << 20  # of their values, and 128 for each span of positions and each point
    breakpoints_per_session: Count = 1000  # one at positions counts for each span of them
    requests: Count = 4096  # unfinished, in all
    requests_per_user: Count = 1024  # unfinished, of all connections of a user
    requests_per_connection: Count = 64
    queue: Count = 1024  # requests that wait for their first row; more are told to come back
    request_bytes: Size = 16 << 20  # of one frame from a client
    output_bytes: Size = 64 << 20  # that wait for a slow client before its connection is closed
    connection_bytes_per_user: Size = 64 << 20  # of large requests, and of replies that wait
    window_bytes_per_user: AutoSize = None  # of activations, logits and KV that a user's clients keep
    descriptors_per_user: Count = 1024  # that a user's clients have sent and that are not closed yet
    model_files_per_user: Count = 1024  # that are kept open, of models that the user has brought
    models_per_user: Count = 16  # that are loaded, or asleep, of those that the user has brought
    arena_bytes_per_user: AutoSize = None  # of shared memory for their weights and host pages; None: half of /dev/shm
    journal_bytes_per_user: Size = 256 << 20  # of sessions' tokens and edits
    journal_reserve: Size = 32 << 20  # of the journal's disk: when less is free, large users are refused
    text_seconds: Seconds = 10  # of CPU time, for one job of a text worker
    text_seconds_per_minute: Seconds = 60  # of CPU time, for text workers and inspections of a user
    text_memory: Size = 1 << 30  # of a text worker, beyond what it begins with
    text_workers: Count = 64  # in all
    grammar_bytes: Size = 256 << 10  # of a format of outputs: a schema, a regular expression, a grammar
    inspection_seconds: Seconds = 20  # of CPU time, for looking at a checkpoint that is not configured
    inspection_memory: Size = 2 << 30  # of that, beyond what the process begins with
    tokenizer_bytes: Size = 64 << 20  # of tokenizer.json, of models that are not configured
    handshake: Seconds = 10  # from connecting to Hello
    frame: Seconds = 30  # from the first byte of a frame to its last
    session_grace: Seconds = 600  # that a session outlives its last connection, or the daemon's start
    session_ttl: Seconds = 7 * 86400  # that a session outlives its last use, attached or not; 0: no limit
    conversation_ttl: Seconds = 86400  # that a kept session outlives its last call; 0: no limit
    record_ttl: Seconds = 30 * 86400  # that a record is kept; 0: no limit
    shutdown_grace: Seconds = 30  # that running requests have to finish
    engine_start: Seconds = 300  # from starting an engine to its first word
    engine_silence: Seconds = 30  # without a word, after which an engine is killed
    engine_wait: Seconds = 120  # that a call waits for an engine that is being started
    engine_deaths_per_user: Count = 3  # over models that a user has brought, after which those are loaded no more
    engine_deaths_window: Seconds = 600  # in which so many count, and for which they are loaded no more; 0: no limit
    kernel_compile: Seconds = 120  # that compiling one kernel may take; without it attention is slower

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in (
            "handshake",
            "frame",
            "engine_start",
            "engine_silence",
            "hub_download",
            "files",
            "text_seconds",
            "text_seconds_per_minute",
            "inspection_seconds",
            "kernel_compile",
        ):  # at 0 nothing could begin
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if self.request_bytes < LEAST_REQUEST_BYTES:
            raise ValueError(f"request_bytes is less than {LEAST_REQUEST_BYTES >> 10}KiB, the least that it may be")
        if self.connection_bytes_per_user < self.request_bytes:
            raise ValueError("connection_bytes_per_user is less than request_bytes: the largest request would not fit")
        if self.edit_bytes_per_session > MAX_EDIT_BYTES:
            raise ValueError(f"edit_bytes_per_session is more than {MAX_EDIT_BYTES >> 20}MiB, the most that it may be")


class Model(Struct, frozen=True):
    path: PathText  # a checkpoint folder, or a hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv: Size = 0  # of device memory for pages; 0: the engine decides
    host_kv: AutoSize = None  # of host memory for pages that have left the device; None: the engine decides; 0: none
    disk_kv: AutoSize = None  # of the state directory's disk, likewise
    max_context: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0  # tokens; 0: the model's own
    preload: bool = False
    resident: Resident = None  # blocks, or a share of them; None: as many as fit
    ring_gb: Gigabytes = 0.0  # of device memory, in 10^9 bytes; 0: by slots
    slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0  # of the ring; 0: the engine decides
    packing: Packing = True
    keep_host: bool = True
    prefetch: bool = True
    piece: Size = 0  # of one copy over the bus; 0: the engine decides
    keep_alive: Seconds = 0  # without a call, after which it gives its device memory back; 0: never
    pooling: Literal["mean", "last"] = "mean"  # of the final norm's rows, for embeddings
    reply_format: ReplyFormatName = "auto"  # of reasoning and tool calls; auto: by the chat template
    chat_template: PathText = ""  # a file; "": the checkpoint's

    def __post_init__(self) -> None:
        """Raises ValueError for values that do not go together, or go nowhere."""
        if self.keep_alive > MAX_KEEP_ALIVE_S:
            raise ValueError(f"keep_alive is more than {MAX_KEEP_ALIVE_S / 3600:.0f}h, the most that it may be")
        try:
            self.placing.validate()
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    @property
    def placing(self) -> Placing:
        return Placing(
            resident=self.resident,
            ring_bytes=ring_bytes(self.ring_gb),
            slots=self.slots,
            packing=self.packing,
            keep_host=self.keep_host,
            prefetch=self.prefetch,
            piece_bytes=self.piece,
        )


class Quota(Struct, frozen=True):
    """What each principal that it matches may have; of several rules that match, the first. Without users and groups it
    matches everybody. `users`: uids, and names that tokens stand for."""

    users: tuple[Principal, ...] = ()
    groups: tuple[Group, ...] = ()
    weight: Weight = 1.0  # of the share of device time
    highest_class: Class = "interactive"
    sessions: LimitCount = None  # None: no limit but `limits.sessions_per_user`
    device_kv: LimitSize = None  # of pages in each tier
    host_kv: LimitSize = None
    disk_kv: LimitSize = None
    tokens_per_s: LimitRate = None  # computed for the user
    connection_bytes: LimitSize = None  # None, here and below: as `limits.NAME_per_user`
    descriptors: LimitCount = None
    window_bytes: LimitSize = None
    requests: LimitCount = None
    journal_bytes: LimitSize = None
    model_files: LimitCount = None
    models: LimitCount = None
    arena_bytes: LimitSize = None


class Functions(Struct, frozen=True):
    """Of clients, that run in intervention processes: whose may, and what they may take. See docs/whitebox.md."""

    users: tuple[User, ...] = ()  # neither these nor groups: nobody's
    groups: tuple[Group, ...] = ()
    seconds: Seconds = 2  # of one run
    memory: Size = 1 << 30  # beyond what the process begins with; the activation counts, twice

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.seconds > 0:
            raise ValueError("seconds must be more than 0: users and groups say whose functions run")
        if not 0 < self.memory <= MAX_FUNCTION_BYTES:
            raise ValueError(f"memory must be more than 0, and at most {MAX_FUNCTION_BYTES >> 40}TiB")


class Http(Struct, frozen=True):
    """The gateway, a process of its own that speaks HTTP. See docs/http.md."""

    listen: PathText = ""  # HOST:PORT; "": no TCP
    socket: PathText = ""  # the path of a Unix socket; "": none
    certificate: PathText = ""  # a PEM file with the chain; read again at SIGHUP
    key: PathText = ""  # likewise
    loopback_without_token: bool = False  # such requests act as the gateway's own Unix user
    cors: tuple[PathText, ...] = ()  # origins whose pages may call; "*": all
    body_bytes: Size = 8 << 20  # of one request
    connections: Count = 4096
    requests: Count = 2048  # that are being answered, in all
    requests_per_token: Count = 256
    held_bytes: Size = 256 << 20  # of the bodies that are being answered, and 40 for each value in them
    held_bytes_per_token: Size = 128 << 20
    header_seconds: Seconds = 10  # from a request's first byte to the end of its headers, and for a TLS handshake
    body_seconds: Seconds = 60  # from there to the end of its body
    write_seconds: Seconds = 60  # that a client may take nothing of what waits for it
    ping_seconds: Seconds = 10  # between signs of life in a stream that waits
    drain_seconds: Seconds = 30  # that requests have to finish when the gateway is stopped

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("header_seconds", "body_seconds", "write_seconds", "ping_seconds"):  # at 0 nothing could begin
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if not self.body_bytes <= self.held_bytes_per_token <= self.held_bytes:
            raise ValueError("none of body_bytes, held_bytes_per_token, held_bytes may be less than the one before")
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together: TLS needs both")


class Scheduling(Struct, frozen=True):
    """See docs/scheduling.md."""

    slowdown: Annotated[float, Meta(ge=1)] = 1.25  # times a step of one session, that decodes, with what joins it
    between_tokens: Seconds = 0  # up to which a step may become longer in any case
    ageing: Seconds = 10  # after which a session that had no row comes first, one at a time
    paging: Annotated[float, Meta(gt=0, le=1)] = (
        0.25  # of the bus, for pages that no call waits for, while others decode
    )


class Config(Struct, frozen=True):
    device: Device = "auto"
    memory: Size = 0  # hard budget of device memory; 0: the engine decides
    socket: PathText = ""  # "": see places.py
    state_dir: PathText = ""
    log: Log = Log()
    limits: Limits = Limits()
    hub: bool = True  # whether clients may name hub ids; those of the configuration are fetched in any case
    models: dict[str, Model] = {}
    scheduling: Scheduling = Scheduling()
    quotas: dict[str, Quota] = {}  # by name of the rule; read again at SIGHUP
    functions: Functions = Functions()
    http: Http = Http()
    metrics: PathText = ""  # path of a socket that answers with Prometheus text; "": none
    admins: tuple[User, ...] = ()  # beside root and the daemon's own user
