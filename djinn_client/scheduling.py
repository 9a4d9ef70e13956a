"""What the daemon says of who runs when: latencies, quotas, and why a session is not running."""

from __future__ import annotations

from typing import Literal

import msgspec

Class = Literal["interactive", "agent", "batch"]
CLASSES: tuple[Class, ...] = ("interactive", "agent", "batch")


class Spread(msgspec.Struct, frozen=True):
    """Of something that was measured `count` times, in seconds. A percentile is a bucket's upper bound, at most an
    eighth more than the true one."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    worst: float = 0.0


class Latency(msgspec.Struct, frozen=True):
    """What callers waited for. `wake_up` is of sessions whose KV had left the device: from COMPUTE, or the call, to the
    first token."""

    queued: Spread = Spread()  # from the call's receipt to its first row
    first_token: Spread = Spread()  # from the call's receipt
    between_tokens: Spread = Spread()
    wake_up: Spread = Spread()


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a session is running, or not. `figures` are those of the sentence. `ahead` are sessions that are served
    before it, the first of them first: the caller's own by id, of other users' only how many there are."""

    state: str
    reason: str
    figures: dict[str, int | float | str] = {}
    ahead: list[str] = []
    others_ahead: int = 0
    user_name: str = ""  # of the session's principal


class ResourceUse(msgspec.Struct, frozen=True, array_like=True):
    """A resource that the daemon counts for each user: what the user holds of it, and the most that it may hold."""

    name: str
    used: int
    limit: int


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may have, and has. A limit of None is none."""

    user: int
    rule: str  # which of the configured ones; "" where none matches
    weight: float
    highest_class: Class
    sessions: int
    sessions_limit: int | None
    device_kv: int  # bytes
    device_kv_limit: int | None
    host_kv: int
    host_kv_limit: int | None
    disk_kv: int
    disk_kv_limit: int | None
    tokens_per_s: float  # prompt and output, of late
    tokens_per_s_limit: float | None
    resources: list[ResourceUse] = []
    user_name: str = ""
