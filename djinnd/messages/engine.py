"""Messages about the engine process itself: start and exit, heartbeat, memory budget, refusals."""

from __future__ import annotations

from typing import Any

from djinn_client.protocol import ModelInfo
from djinnd.messages.directions import CallAnswer, EngineCall, FromEngine, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class SetBudget(EngineCall["BudgetSet"], tag="set_budget"):
    """Answered by BudgetSet when blocks and pages have been moved to fit the new budget. Answered by Failed when they
    cannot: nothing has changed then, and `out_of_memory` carries the least budget that would work."""

    memory_bytes: int


class Shutdown(ToEngine, tag="shutdown"):
    """One-way: the engine ends its step and exits 0. `keep_pages`: it first writes the sessions' pages to the host or
    to disk, as far as there is room, where the next engine finds them."""

    keep_pages: bool = False


# --- engine to server -----------------------------------------------------------------------------------------------


class Ready(FromEngine, tag="ready"):
    """First message of an engine: it has opened its device."""

    device: str
    description: str
    budget_bytes: int
    pid: int


class Alive(FromEngine, tag="alive"):
    """One-way, at least once a second: the step loop is turning. The server kills an engine that has been silent for
    too long."""


class BudgetSet(CallAnswer, tag="budget_set"):
    budget_bytes: int
    used_bytes: int
    seconds: float  # duration of the change
    models: list[ModelInfo]


class Failed(FromEngine, tag="failed"):
    """Final reply; `code` is one of djinn_client.errors. A failed Run leaves the session as it was before the Run."""

    request: int
    code: str
    message: str
    data: dict[str, Any] = {}
