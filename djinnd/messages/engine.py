"""The engine itself: its beginning and its end, its budget, that it lives, and how it refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from djinn_client.protocol import ModelInfo

# --- server to engine -----------------------------------------------------------------------------------------------


class SetBudget(msgspec.Struct, tag="set_budget"):
    """Answered by BudgetSet when blocks and pages are where the new budget has them, or by Failed, and then nothing has
    changed: `out_of_memory` with the figure that it could go down to."""

    request: int
    memory_bytes: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """One-way: the engine ends its step and exits 0. `keep_pages`: the next engine is to find the pages of sessions on
    the host or on disk, as far as these have room."""

    keep_pages: bool = False


# --- engine to server -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    """First message of an engine: the device is there."""

    device: str
    description: str
    budget_bytes: int
    pid: int


class Alive(msgspec.Struct, tag="alive"):
    """One-way, at least once a second: the step loop turns. A server that hears none for long kills the engine."""

    step: int


class BudgetSet(msgspec.Struct, tag="budget_set"):
    request: int
    budget_bytes: int
    used_bytes: int
    seconds: float  # that the change took
    models: list[ModelInfo]


class Failed(msgspec.Struct, tag="failed"):
    """Final reply; `code` as in djinn_client.errors. A failed Run leaves the session as it was before it."""

    request: int
    code: str
    message: str
    data: dict[str, Any] = {}
