"""The schema of the configuration: the keys of djinnd.yaml, which docs/reference/configuration.md explains."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.placing import MAX_SLOTS, Placing, ring_bytes
from djinn_client.protocol.fields.scheduling import Class
from djinnd.config.units import (
    MAX_COUNT,
    AutoOrOff,
    AutoSize,
    Device,
    Gigabytes,
    Group,
    LimitCount,
    LimitRate,
    LimitSize,
    PathText,
    Principal,
    Resident,
    Seconds,
    Size,
    Speculation,
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

MAX_EDIT_BYTES = 128 << 20  # of a session; its edits and tokens are one message to an engine
MAX_KEEP_ALIVE_S = 365 * 86400.0
MAX_FUNCTION_BYTES = 1 << 50  # the kernel accepts this plus the process's own memory as a limit
LEAST_REQUEST_BYTES = 64 << 10  # the commands of djinnctl are smaller


class Log(Struct, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Limits(Struct, frozen=True):
    """Limits of the daemon and of each user. Counts and bytes are maxima unless the comment says otherwise."""

    sessions: Count = 4096  # in all
    sessions_per_user: Count = 1024
    detached_per_user: Count = 256  # sessions without a client; beyond that the longest unused are closed
    conversations_per_user: Count = 256  # sessions kept for chat APIs; beyond that the longest idle are closed
    records_per_user: Count = 1024  # named points of conversations; beyond that the oldest are dropped
    record_bytes: Size = 4 << 20  # data of the caller in one record
    connections_per_user: Count = 1024
    tokens: Count = 1024  # access tokens added by administrators, in all
    shared_models_per_user: Count = 8
    downloads: Count = 8  # from the hub at a time, in all
    downloads_per_user: Count = 2
    hub_download: Seconds = 6 * 3600  # duration of one download
    files: Seconds = 30  # time to open a checkpoint's files and to read the small ones
    public_prefixes_per_model: Count = 256
    edits_per_session: Count = 1000
    edits_per_position: Count = 16  # at one point; they are applied one after another, and the whole step waits
    edit_bytes_per_session: Size = 64 << 20  # values of the edits, and 128 for each span of positions and each point
    breakpoints_per_session: Count = 1000  # a breakpoint at positions counts once for each span
    requests: Count = 4096  # unfinished, in all
    requests_per_user: Count = 1024  # unfinished, of all connections of a user
    requests_per_connection: Count = 64
    queue: Count = 1024  # requests waiting for their first row; further requests get Busy
    request_bytes: Size = 16 << 20  # one frame of a client
    output_bytes: Size = 64 << 20  # waiting for a slow client; beyond that its connection is closed
    connection_bytes_per_user: Size = 64 << 20  # large requests, and replies that wait
    window_bytes_per_user: AutoSize = None  # activations, logits and KV that a user's clients keep
    descriptors_per_user: Count = 1024  # sent by a user's clients and not closed yet
    model_files_per_user: Count = 1024  # open files of models that the user has brought
    models_per_user: Count = 16  # loaded or asleep models that the user has brought
    adapter_bytes: Size = 2 << 30  # matrices of one LoRA adapter
    adapter_bytes_per_user: Size = 8 << 30  # matrices of adapters that a user has brought, in host memory
    arena_bytes_per_user: AutoSize = None  # shared memory of their weights and host pages; None: half of /dev/shm
    journal_bytes_per_user: Size = 256 << 20  # tokens and edits of sessions
    journal_reserve: Size = 32 << 20  # free space of the journal's disk below which large users are refused
    text_seconds: Seconds = 10  # CPU time of one job of a text worker
    text_seconds_per_minute: Seconds = 60  # CPU time of a user's text workers and inspections
    text_memory: Size = 1 << 30  # memory of a text worker beyond its memory at the start
    text_workers: Count = 64  # in all
    grammar_seconds_per_minute: Seconds = 600  # CPU time of a user's grammar processes
    grammar_bytes: Size = 256 << 10  # a format of outputs: a schema, a regular expression, a grammar
    inspection_seconds: Seconds = 20  # CPU time to inspect a checkpoint that is not configured
    inspection_memory: Size = 2 << 30  # memory of an inspection beyond its memory at the start
    tokenizer_bytes: Size = 64 << 20  # tokenizer.json of a model that is not configured
    handshake: Seconds = 10  # from connecting to Hello
    frame: Seconds = 30  # from the first byte of a frame to its last
    session_grace: Seconds = 600  # a session ends so long after its last connection, or after the daemon's start
    session_ttl: Seconds = 7 * 86400  # a session ends so long after its last use, attached or not; 0: never
    conversation_ttl: Seconds = 86400  # a session of a conversation ends so long after its last call; 0: never
    record_ttl: Seconds = 30 * 86400  # a record is kept so long; 0: for ever
    shutdown_grace: Seconds = 30  # time for running requests to finish
    engine_start: Seconds = 300  # from starting an engine to its first message
    engine_silence: Seconds = 30  # an engine that sends nothing for so long is killed
    engine_wait: Seconds = 120  # a call waits so long for an engine that is being started
    engine_deaths_per_user: Count = 3  # after so many crashes by a user's own models, these are not loaded any more
    engine_deaths_window: Seconds = 600  # crashes count so long, and loads are refused so long; 0: no limit
    kernel_compile: Seconds = 120  # time to compile one kernel; without that kernel attention is slower

    def __post_init__(self) -> None:
        """Raises ValueError for limits that are 0 or contradict each other."""
        for name in (
            "handshake",
            "frame",
            "engine_start",
            "engine_silence",
            "hub_download",
            "files",
            "text_seconds",
            "text_seconds_per_minute",
            "grammar_seconds_per_minute",
            "inspection_seconds",
            "kernel_compile",
        ):  # with 0 nothing could start
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if self.request_bytes < LEAST_REQUEST_BYTES:
            raise ValueError(f"request_bytes must be at least {LEAST_REQUEST_BYTES >> 10}KiB")
        if self.connection_bytes_per_user < self.request_bytes:
            raise ValueError("connection_bytes_per_user is less than request_bytes: the largest request would not fit")
        if self.edit_bytes_per_session > MAX_EDIT_BYTES:
            raise ValueError(f"edit_bytes_per_session must be at most {MAX_EDIT_BYTES >> 20}MiB")


class Model(Struct, frozen=True):
    """A model that clients use by its key in `models`."""

    path: PathText  # a checkpoint folder, or a hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    part: Literal["all", "heads"] = "all"  # heads: only the head that predicts several tokens, as another model's draft
    kv: Size = 0  # device memory for pages; 0: the engine decides
    host_kv: AutoSize = None  # host memory for pages that have left the device; None: the engine decides; 0: none
    disk_kv: AutoSize = None  # disk of the state directory for such pages, likewise
    max_context: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0  # tokens; 0: the model's own
    preload: bool = False  # load at the daemon's start
    resident: Resident = None  # blocks, or a share of them; None: as many as fit
    ring_gb: Gigabytes = 0.0  # device memory of the ring, in 10^9 bytes; 0: by slots
    slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0  # of the ring; 0: the engine decides
    packing: AutoOrOff = True  # pack blocks in the 12-bit code, if they can be
    quantise: Literal["none", "fp8", "int8"] = "none"  # plain matrices of blocks, when they are loaded
    kv_dtype: Literal["auto", "fp8"] = "auto"  # of keys and values in pages; auto: that of computing
    speculation: Speculation = False  # steps run guesses of next tokens, if that pays; a name: of a draft model
    cpu_beside_bus: AutoOrOff = False  # the host's cores compute MLPs of streamed blocks, if that pays
    keep_host: bool = True  # keep the host copy of a model that is resident
    prefetch: bool = True  # copy streamed blocks ahead of their turn
    piece: Size = 0  # bytes of one copy over the bus; 0: the engine decides
    keep_alive: Seconds = 0  # after so long without a call, the model gives its device memory back; 0: never
    pooling: Literal["mean", "last"] = "mean"  # of the final norm's rows, for embeddings
    reply_format: ReplyFormatName = "auto"  # of reasoning and tool calls; auto: by the chat template
    chat_template: PathText = ""  # a file; "": the checkpoint's
    adapter_memory: Size = 0  # device memory that a load sets aside for LoRA adapters; 0: none
    adapters: dict[str, PathText] = {}  # name → PEFT folder of a LoRA adapter that sessions may name

    def __post_init__(self) -> None:
        """Raises ValueError for values that contradict each other or have no effect."""
        if self.keep_alive > MAX_KEEP_ALIVE_S:
            raise ValueError(f"keep_alive must be at most {MAX_KEEP_ALIVE_S / 3600:.0f}h")
        if self.part == "heads" and self.resident not in (None, 1.0):
            raise ValueError(f"a head does not stream, so resident must be auto or 1.0, and not {self.resident}")
        if self.part == "heads" and self.speculation:
            raise ValueError("a head has no speculation of its own: give it to the model that the head guesses for")
        try:
            self.placing.validate()
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    @property
    def placing(self) -> Placing:
        return Placing(
            resident=1.0 if self.part == "heads" else self.resident,
            ring_bytes=ring_bytes(self.ring_gb),
            slots=self.slots,
            packing=self.packing,
            quantise="" if self.quantise == "none" else self.quantise,
            kv_dtype="" if self.kv_dtype == "auto" else self.kv_dtype,
            speculation=bool(self.speculation),
            draft=self.speculation if isinstance(self.speculation, str) else "",
            part="heads" if self.part == "heads" else "",
            cpu_beside_bus=self.cpu_beside_bus,
            adapter_bytes=self.adapter_memory,
            keep_host=self.keep_host,
            prefetch=self.prefetch,
            piece_bytes=self.piece,
        )


class Quota(Struct, frozen=True):
    """A rule with limits for each principal that it matches. The first rule that matches a principal applies. A rule
    without users and groups matches every principal."""

    users: tuple[Principal, ...] = ()  # uids, and names of tokens
    groups: tuple[Group, ...] = ()
    weight: Weight = 1.0  # share of device time, relative to other users
    highest_class: Class = "interactive"
    sessions: LimitCount = None  # None: only `limits.sessions_per_user`
    device_kv: LimitSize = None  # pages on the device
    host_kv: LimitSize = None
    disk_kv: LimitSize = None
    tokens_per_s: LimitRate = None  # tokens computed for the user
    connection_bytes: LimitSize = None  # None, here and below: `limits.NAME_per_user`
    descriptors: LimitCount = None
    window_bytes: LimitSize = None
    requests: LimitCount = None
    journal_bytes: LimitSize = None
    model_files: LimitCount = None
    models: LimitCount = None
    arena_bytes: LimitSize = None
    adapter_bytes: LimitSize = None


class Functions(Struct, frozen=True):
    """Functions of clients in intervention processes: permitted users, and limits. See docs/guide/whitebox.md."""

    users: tuple[User, ...] = ()  # without users and groups, no functions run
    groups: tuple[Group, ...] = ()
    seconds: Seconds = 2  # of one run
    memory: Size = 1 << 30  # beyond the process's memory at the start; the activation counts twice

    def __post_init__(self) -> None:
        """Raises ValueError for limits that are 0 or too large."""
        if not self.seconds > 0:
            raise ValueError("seconds must be more than 0; to allow no functions, leave users and groups out")
        if not 0 < self.memory <= MAX_FUNCTION_BYTES:
            raise ValueError(f"memory must be more than 0, and at most {MAX_FUNCTION_BYTES >> 40}TiB")


class Http(Struct, frozen=True):
    """The gateway, a process of its own that serves HTTP. See docs/reference/http.md."""

    listen: PathText = ""  # HOST:PORT; "": no TCP
    socket: PathText = ""  # the path of a Unix socket; "": none
    certificate: PathText = ""  # a PEM file with the chain; read again at SIGHUP
    key: PathText = ""  # likewise
    loopback_without_token: bool = False  # such requests act as the gateway's own Unix user
    cors: tuple[PathText, ...] = ()  # origins of web pages that may call; "*": all
    body_bytes: Size = 8 << 20  # body of one request
    connections: Count = 4096
    requests: Count = 2048  # unfinished, in all
    requests_per_token: Count = 256
    held_bytes: Size = 256 << 20  # bodies of unfinished requests, and 40 for each value in them
    held_bytes_per_token: Size = 128 << 20
    header_seconds: Seconds = 10  # from a request's first byte to the end of its headers, and for a TLS handshake
    body_seconds: Seconds = 60  # from the end of the headers to the end of the body
    write_seconds: Seconds = 60  # a client that reads nothing for so long is disconnected
    ping_seconds: Seconds = 10  # between keep-alive messages in a stream without output
    drain_seconds: Seconds = 30  # time for requests to finish when the gateway stops

    def __post_init__(self) -> None:
        """Raises ValueError for limits that are 0 or contradict each other."""
        for name in ("header_seconds", "body_seconds", "write_seconds", "ping_seconds"):  # with 0 nothing could start
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if not self.body_bytes <= self.held_bytes_per_token <= self.held_bytes:
            raise ValueError("body_bytes must be at most held_bytes_per_token, and that at most held_bytes")
        if bool(self.certificate) != bool(self.key):
            raise ValueError("TLS needs both certificate and key")


class Remote(Struct, frozen=True):
    """Sessions from other machines: the gateway takes them at a port of its own, with the certificate and key of
    `http`. See docs/guide/another-machine.md."""

    listen: PathText = ""  # HOST:PORT; "": none
    connections: Count = 1024
    connections_per_token: Count = 256
    grace: Seconds = 30  # the time in which a client may continue a connection that broke
    window_bytes: Size = 8 << 30  # memory that clients are sending: KV, weights, files
    window_bytes_per_token: Size = 4 << 30

    def __post_init__(self) -> None:
        """Raises ValueError for limits that are 0 or contradict each other."""
        if not self.grace > 0:
            raise ValueError("grace must be more than 0")
        if not 0 < self.window_bytes_per_token <= self.window_bytes:
            raise ValueError("window_bytes_per_token must be more than 0, and at most window_bytes")


class InteractiveTargets(Struct, frozen=True):
    """Latency targets of sessions of the class. A request may have others."""

    between_tokens: Seconds = 0.04  # a step with sessions that generate takes at most so long; 0: no target
    first_token: Seconds = 0.4  # from the call to its first token; 0: no target


class AgentTargets(Struct, frozen=True):
    between_tokens: Seconds = 0.08
    first_token: Seconds = 0.4  # also after a tool


class BatchTargets(Struct, frozen=True):
    between_tokens: Seconds = 0
    first_token: Seconds = 0


class Scheduling(Struct, frozen=True):
    """Settings of the scheduler. See docs/design/scheduling.md."""

    interactive: InteractiveTargets = InteractiveTargets()
    agent: AgentTargets = AgentTargets()
    batch: BatchTargets = BatchTargets()
    ageing: Seconds = 10  # a session without a row for so long is scheduled first, one such session at a time
    # Share of the bus for pages that no call waits for, while other sessions decode.
    paging: Annotated[float, Meta(gt=0, le=1)] = 0.25

    @property
    def targets(self) -> dict[Class, tuple[float, float]]:
        """Seconds by class: between tokens, and to the first token; 0: none."""
        classes: dict[Class, InteractiveTargets | AgentTargets | BatchTargets] = {
            "interactive": self.interactive,
            "agent": self.agent,
            "batch": self.batch,
        }
        return {name: (each.between_tokens, each.first_token) for name, each in classes.items()}


class Config(Struct, frozen=True):
    device: Device = "auto"
    memory: Size = 0  # hard budget of device memory; 0: the engine decides
    socket: PathText = ""  # "": see places.py
    state_dir: PathText = ""
    log: Log = Log()
    limits: Limits = Limits()
    hub: bool = True  # clients may name hub ids; configured hub ids are fetched in any case
    models: dict[str, Model] = {}
    scheduling: Scheduling = Scheduling()
    quotas: dict[str, Quota] = {}  # name of the rule → rule; read again at SIGHUP
    functions: Functions = Functions()
    http: Http = Http()
    remote: Remote = Remote()
    metrics: PathText = ""  # path of a Unix socket that serves Prometheus text; "": none
    admins: tuple[User, ...] = ()  # in addition to root and the daemon's own user
