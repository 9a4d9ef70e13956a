"""Messages about scheduling: classes, signals, pauses, limits of tenants, and the reason why a session waits."""

from __future__ import annotations

import msgspec

from djinn_client.protocol import Class, Tier
from djinnd.messages.directions import CallAnswer, EngineCall, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class SetClass(ToEngine, tag="set_class"):
    """One-way: from now on the session and its running request have this class."""

    session: str
    priority: Class


class Signal(ToEngine, tag="signal"):
    """One-way: the client says what its session does next.

    `waits` True: the session waits for something else, for about `expected_s` seconds (0: unknown). Its pages may leave
    the device as soon as it is idle. `waits` False: the session will compute soon.
    """

    session: str
    waits: bool
    expected_s: float = 0.0
    tool: str = ""  # the tool that it waits for


class Pause(EngineCall["Paused"], tag="pause"):
    """The session gets no row until Resume, and its pages move to `tier`. Answered by Paused when they are there.
    Answered by Failed when they cannot move, and then the session is not paused."""

    session: str
    tier: Tier


class Resume(ToEngine, tag="resume"):
    """One-way. Does nothing to a session that is not paused."""

    session: str


class TenantLimits(msgspec.Struct, frozen=True):
    """`weight`: its share of device time, relative to the shares of other tenants. `*_kv`: most bytes of its pages in
    each tier; None: no limit."""

    tenant: int
    weight: float = 1.0
    device_kv: int | None = None
    host_kv: int | None = None
    disk_kv: int | None = None


class SetTenants(ToEngine, tag="set_tenants"):
    """One-way: these tenants have these limits from now on. A tenant that is not named keeps its limits. A new tenant
    has none."""

    tenants: list[TenantLimits]


class SetPolicy(ToEngine, tag="set_policy"):
    """One-way: see config.Scheduling. `targets` are seconds by class: between tokens, and to the first token; 0: none.
    `ageing` is in seconds."""

    targets: dict[Class, tuple[float, float]]
    ageing: float
    paging: float


class Explain(EngineCall["Explained"], tag="explain"):
    """Answered by Explained, or by Failed(session_not_found)."""

    session: str


# --- engine to server -----------------------------------------------------------------------------------------------


class Paused(CallAnswer, tag="paused"):
    pages: int  # of the session in the tier
    nbytes: int
    seconds: float


class Explained(CallAnswer, tag="explained"):
    """Reply to Explain. `ahead`: sessions of the model that are served before this one, in their order."""

    state: str
    reason: str
    figures: dict[str, int | float | str]
    ahead: list[str]
