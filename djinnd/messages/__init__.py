"""Messages between the server and the engine, over their socket pair: typed structs in the wire protocol's frames.

The server numbers requests. The numbers are unique in the daemon and are not the client's ids. For each `Run` the
engine sends `Started` (inside `Stepping`), `Token`s (inside `Stepped`), and then exactly one `Finished`, `LogitsReady`
or `Failed`. Each other message with a `request` gets exactly one final reply. A message without a `request` is one-way.

A load asks for shared memory halfway, because only the engine knows the layout and only the server creates the arena:

    server ──Load──► engine ──NeedArena──► server ──ArenaReady──► engine ──Loading…──► Loaded
                                               └──ArenaRefused──► engine ──► Failed

The checkpoint is a path that the engine opens, or a set of open files that travel with the frame. When a client shares
its own weights, the server first asks for their layout (DescribeImage, answered by ImageDescribed). The ArenaReady of
such a model carries a descriptor of the client's image.

| module | contents |
|---|---|
| `engine` | the engine's start and exit, its memory budget, refusals |
| `models` | plan, load and unload a model |
| `inspections` | checks of a checkpoint in a confined child process, before the engine reads it |
| `arenas` | shared memory for weights and pages |
| `sessions` | open, fork, close and edit a session; export and import its KV |
| `runs` | a request that extends a session, and the tokens of each step |
| `scheduling` | classes, signals, pauses, tenants, and the reason why a session waits |
| `figures` | reports, and traces of steps |
| `protocol` | the unions of all messages by direction, and their encoding |
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
    CaptureLayout,
    Finished,
    Grammar,
    GrammarTime,
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
    "CaptureLayout",
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
    "GrammarTime",
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
