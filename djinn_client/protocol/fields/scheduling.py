"""Latencies, quotas, and why a session runs or waits, as the daemon tells them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Class = Literal["interactive", "agent", "batch"]
CLASSES: tuple[Class, ...] = get_args(Class)  # the first class is served first


class Spread(msgspec.Struct, frozen=True):
    """The spread of `count` measured times, in seconds. A percentile is a bucket's upper bound, at most an
    eighth more than the true one."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    worst: float = 0.0


class Latency(msgspec.Struct, frozen=True):
    """How long callers waited. `wake_up` is of sessions whose KV had left the device: from COMPUTE, or the call, to the
    first token."""

    queued: Spread = Spread()  # from the call's receipt to its first row
    first_token: Spread = Spread()  # from the call's receipt
    between_tokens: Spread = Spread()
    wake_up: Spread = Spread()


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a session runs or waits. `figures` has the figures of the sentence `reason`. `ahead` has the caller's own
    sessions that are served before it, the first of them first; other users' sessions are only counted."""

    state: str
    reason: str
    figures: dict[str, int | float | str] = {}
    ahead: list[str] = []
    others_ahead: int = 0
    user_name: str = ""  # of the session's principal


class ResourceUse(msgspec.Struct, frozen=True, array_like=True):
    """A resource that the daemon counts for each user: how much the user holds, and the most that it may hold."""

    name: str
    used: int
    limit: int


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """The quotas of a user, and their use. A limit of None is no limit."""

    user: int
    rule: str  # the configured rule that holds; "" if none matches
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
