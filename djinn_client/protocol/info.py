"""Descriptions of what the daemon holds: sessions, models, devices, public prefixes, tokens."""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.protocol.fields.placing import KvForm, Quantise
from djinn_client.protocol.fields.points import PointMap
from djinn_client.protocol.fields.scheduling import Class, Latency

Tier = Literal["device", "host", "disk"]  # where a page is


class SessionInfo(msgspec.Struct, kw_only=True):
    id: str
    model: str
    priority: Class
    user: int
    state: str  # idle, stopped, waiting, arriving, paused, queued, running, held, detached, kept
    tokens: int
    kv_tokens: int  # tokens whose KV is on the device
    pages: int  # held on the device
    host_pages: int = 0  # found on the host
    disk_pages: int = 0
    page_bytes: int = 0
    age_s: float
    idle_s: float
    attached: int  # connections
    edits: int = 0  # steering and patches
    hit: HitInfo | None = None  # the breakpoint at which the last call has stopped
    foreign_kv: bool = False  # a client has brought the KV of its beginning: see ImportSession
    latency: Latency = Latency()  # of the calls so far
    adapter: str = ""  # its LoRA adapter; "": none
    user_name: str = ""


class ModelInfo(msgspec.Struct, kw_only=True):
    name: str
    path: str
    fingerprint: str = ""  # of the weights and the configuration, the same on every machine
    family: str = ""
    state: str = ""  # available, loading, ready, asleep, failed, set aside
    dtype: str = ""
    codes: list[str] = []  # in which the checkpoint's weights are kept, such as fp8 or Q4_K; empty: in the dtype
    quantised: Quantise = ""  # its weights were quantised when they were loaded: see Placing.quantise
    kv_dtype: KvForm = ""  # its KV is not in `dtype`: see Placing.kv_dtype
    parameters: int = 0
    blocks: int = 0
    blocks_plain: int = 0  # resident as in the checkpoint
    blocks_packed: int = 0  # resident in the 12-bit code, or in `codes`
    blocks_streamed: int = 0
    streamed_bytes: int = 0  # over the bus in one pass
    ring_bytes: int = 0  # of device memory
    scratch_bytes: int = 0  # of device memory, where packed blocks are decoded
    vocab: int = 0
    points: PointMap | None = None  # None: not loaded
    max_context: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    kv: KvLayout | None = None  # of its pages; None: not loaded
    kv_heads: int = 0  # 0: not the same in all blocks, see kv
    head_dim: int = 0
    page_size: int = 0  # tokens
    page_bytes: int = 0
    pages: int = 0
    pages_used: int = 0
    host_pages: int = 0  # room of the host tier
    host_pages_used: int = 0
    host_pages_pinned: int = 0  # so far: pinning all of a new tier takes some seconds
    disk_pages: int = 0
    disk_pages_used: int = 0
    adapters: list[str] = []  # names of its configured LoRA adapters
    sessions: int = 0
    idle_s: float = 0.0  # since the last call, of a model that is ready or asleep; 0 while a call runs
    error: str = ""
    notes: list[str] = []  # for people to read, such as why blocks stay plain

    @property
    def kv_layout(self) -> KvLayout:
        """The layout of its KV in windows, for a loaded model."""
        if self.kv is not None:
            return self.kv
        return KvLayout(self.dtype, self.blocks, self.page_size, self.kv_heads, self.head_dim)  # type: ignore[arg-type]


class AdapterInfo(msgspec.Struct, kw_only=True):
    """A LoRA adapter. `identity`, `rank`, `modules` and `nbytes` are known from its first load on."""

    name: str  # in the configuration, or FOLDER@DIGEST
    model: str
    folder: str
    identity: str = ""  # hash of its files, hexadecimal
    rank: int = 0  # the largest
    modules: int = 0  # that it changes
    nbytes: int = 0  # of host memory, and of device memory while it is there
    is_loaded: bool = False
    is_configured: bool = False
    sessions: int = 0


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


class PrefixInfo(msgspec.Struct, kw_only=True):
    id: str
    model: str
    tokens: int  # public ones, which fill pages
    user: int  # the administrator who has published it
    created: float  # seconds since 1970
    user_name: str = ""


class TokenInfo(msgspec.Struct, kw_only=True):
    """Times are seconds since 1970."""

    name: str
    user: int  # the principal for whom it stands: a uid, or the number of a name
    user_name: str
    highest_class: Class | None
    created: float
    expires: float | None  # None: never
    used: float | None  # the last time that a connection began with it, to a minute; None: never
