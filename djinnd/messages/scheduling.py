"""Whose turn it is: what the scheduler is told of sessions and tenants, and why it has a session wait."""

from __future__ import annotations

import msgspec

from djinn_client.protocol import Class, Tier

# --- server to engine -----------------------------------------------------------------------------------------------


class SetClass(msgspec.Struct, tag="set_class"):
    """One-way: the session has this class from now on, and the request that runs on it, too."""

    session: str
    priority: Class


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
    paging: float


class Explain(msgspec.Struct, tag="explain"):
    """Answered by Explained, or by Failed(session_not_found)."""

    request: int
    session: str


# --- engine to server -----------------------------------------------------------------------------------------------


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
