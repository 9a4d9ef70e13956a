"""What server and engine say to each other over their socket pair: typed structs in the frames of the wire protocol.

The server numbers requests (unique in the daemon, not the client's ids). For each `Run` the engine sends `Started` in
`Stepping`, `Token`s in `Stepped`, and then exactly one `Finished`, `LogitsReady` or `Failed`; for each other message
with a `request`, exactly one final reply. A message without a `request` is one-way.

Loading asks for shared memory in mid-way: only the engine knows the layout, and only the server creates the arena.

    server ──Load──► engine ──NeedArena──► server ──ArenaReady──► engine ──Loading…──► Loaded
                                                └──ArenaRefused──► engine ──► Failed

The checkpoint is a path that the engine opens, or open files that travel with the frame. A model that a client shares
is laid out before it is loaded: DescribeImage, ImageDescribed. Its ArenaReady brings the client's image, a descriptor
that travels with the frame.

| module | what |
|---|---|
| `engine` | its beginning, its end, its budget, and how it refuses |
| `models` | what one would come to; its load, and its way out |
| `inspections` | checks of a checkpoint in a confined child, before the engine sees it |
| `arenas` | shared memory for weights and pages |
| `sessions` | their beginning and their end, what changes in them between runs, their KV on its way |
| `runs` | what a session is extended by, and what a step gives |
| `scheduling` | classes, signals, pauses, tenants, and why a session waits |
| `figures` | reports, and traces of steps |
| `protocol` | all of them by direction, and their bytes |
"""

from __future__ import annotations

from djinnd.messages.arenas import ArenaFilled, ArenaReady, ArenaRefused, Holding, HostReleased, NeedArena
from djinnd.messages.engine import Alive, BudgetSet, Failed, Ready, SetBudget, Shutdown
from djinnd.messages.figures import Inquire, Report, SessionUse, TenantUse, Trace, Traced
from djinnd.messages.inspections import DescribeDevice, DeviceDescribed, DeviceFigures
from djinnd.messages.models import (
    DescribeImage,
    ImageDescribed,
    Load,
    Loaded,
    Loading,
    Plan,
    Planned,
    PublicPrefix,
    Unload,
    Unloaded,
)
from djinnd.messages.protocol import (
    MAX_FDS,
    MAX_FRAME,
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from djinnd.messages.runs import (
    CancelRun,
    Capture,
    Finished,
    Grammar,
    Halt,
    Hold,
    LogitsReady,
    PromptScored,
    Recomputed,
    Run,
    Started,
    Stepped,
    Stepping,
    Token,
)
from djinnd.messages.scheduling import (
    Explain,
    Explained,
    Pause,
    Paused,
    Resume,
    SetClass,
    SetPolicy,
    SetTenants,
    Signal,
    TenantLimits,
)
from djinnd.messages.sessions import AddEdit, Close, EndEdits, ExportKv, Fork, ImportKv, KvExported, Open, Truncate

__all__ = [
    "MAX_FDS",
    "MAX_FRAME",
    "AddEdit",
    "Alive",
    "ArenaFilled",
    "ArenaReady",
    "ArenaRefused",
    "BudgetSet",
    "CancelRun",
    "Capture",
    "Close",
    "DescribeDevice",
    "DescribeImage",
    "DeviceDescribed",
    "DeviceFigures",
    "EndEdits",
    "Explain",
    "Explained",
    "ExportKv",
    "Failed",
    "Finished",
    "Fork",
    "FromEngine",
    "Grammar",
    "Halt",
    "Hold",
    "Holding",
    "HostReleased",
    "ImageDescribed",
    "ImportKv",
    "Inquire",
    "KvExported",
    "Load",
    "Loaded",
    "Loading",
    "LogitsReady",
    "NeedArena",
    "Open",
    "Pause",
    "Paused",
    "Plan",
    "Planned",
    "PromptScored",
    "PublicPrefix",
    "Ready",
    "Recomputed",
    "Report",
    "Resume",
    "Run",
    "SessionUse",
    "SetBudget",
    "SetClass",
    "SetPolicy",
    "SetTenants",
    "Shutdown",
    "Signal",
    "Started",
    "Stepped",
    "Stepping",
    "TenantLimits",
    "TenantUse",
    "ToEngine",
    "Token",
    "Trace",
    "Traced",
    "Truncate",
    "Unload",
    "Unloaded",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]
