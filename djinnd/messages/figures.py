"""Messages about the engine's state: a report of its memory and requests, and a trace of its steps."""

from __future__ import annotations

import msgspec

from djinn_client.protocol import ModelInfo, Span
from djinnd.messages.directions import CallAnswer, EngineCall

# --- server to engine -----------------------------------------------------------------------------------------------


class Inquire(EngineCall["Report"], tag="inquire"):
    check: bool = False


class Trace(EngineCall["Traced"], tag="trace"):
    """Answered by Traced when the next `steps` steps have been recorded, or after `seconds` with the steps recorded
    until then. Answered by Failed(retry) while another trace is being recorded."""

    steps: int
    seconds: float


# --- engine to server -----------------------------------------------------------------------------------------------


class SessionUse(msgspec.Struct, array_like=True):
    """A session's pages in each tier. `host_pages` and `disk_pages` count only pages that are not on the device."""

    session: str
    state: str  # idle, waiting, arriving, paused, or the state of its request
    kv_tokens: int  # on the device
    pages: int
    host_pages: int = 0
    disk_pages: int = 0


class TenantUse(msgspec.Struct, array_like=True):
    """Bytes of the tenant's pages in each tier, over all models."""

    tenant: int
    device_kv: int
    host_kv: int
    disk_kv: int


class Report(CallAnswer, tag="report"):
    budget_bytes: int
    used_bytes: int
    steps: int
    generated_tokens: int
    models: list[ModelInfo]
    sessions: list[SessionUse]
    tenants: list[TenantUse] = []
    findings: list[str] = []
    copied: dict[str, int] = {}  # bytes since the engine started: of weights, pages up, pages down


class Traced(CallAnswer, tag="traced"):
    spans: list[Span]
