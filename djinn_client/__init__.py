"""djinn_client: sessions of the models that djinnd holds.

    import djinn_client as djinn

    with djinn.Session("djinn-tiny") as s:
        print(s.generate("def fibonacci(", max_tokens=32).text)
        for piece in s.stream(max_tokens=16):
            print(piece.text, end="")

asyncio, numpy and torch are imported when something that needs them is first used. numpy is not installed with the
client: `pip install 'djinn-client[tensors]'` for `forward`, `capture`, breakpoints, `steer` and `kv`.
"""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from djinn_client.admin.client import Client
from djinn_client.admin.embeddings import Embeddings
from djinn_client.api.client import Session
from djinn_client.api.functions import (
    chat,
    close,
    detokenize,
    embed,
    generate,
    load,
    load_session,
    models,
    pause,
    plan,
    points,
    quotas,
    sessions,
    set_budget,
    set_priority,
    status,
    tokenize,
    tokenizer,
    trace,
    unload,
    unpause,
    why,
)
from djinn_client.arguments.options import ChatOptions, GenerateOptions, PlacingOptions
from djinn_client.errors import (
    Busy,
    Cancelled,
    ConnectionLost,
    DjinnError,
    EngineLost,
    FileDamaged,
    FilesWanted,
    FrameTooLarge,
    FunctionFailed,
    FunctionNotFound,
    GrammarRejected,
    InvalidRequest,
    JournalUnavailable,
    ModelMismatch,
    ModelNotFound,
    ModelRejected,
    NotAuthenticated,
    NotFound,
    NoTokenizer,
    NotPermitted,
    OutOfMemory,
    PromptTooLong,
    ProtocolError,
    QuotaExceeded,
    Retry,
    SessionBusy,
    SessionLost,
    SessionNotFound,
    SessionStateError,
    ShuttingDown,
    TextFailed,
    TokenOutOfRange,
    VersionMismatch,
)
from djinn_client.handover.kv import KV, KvWindow, kv_window
from djinn_client.old_names import warn_of
from djinn_client.protocol import (
    BudgetReply,
    DeviceInfo,
    Generated,
    Logprobs,
    ModelInfo,
    PauseReply,
    Piece,
    PrefixInfo,
    Progress,
    PromptLogprobs,
    Record,
    RecordInfo,
    SessionInfo,
    Span,
    StatusReply,
    Timings,
    TokenAdded,
    TokenInfo,
    TokenizerInfo,
    TraceReply,
    Usage,
)
from djinn_client.protocol.fields.breakpoints import BreakpointInfo, HitInfo
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinn_client.protocol.fields.edits import EditInfo
from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.protocol.fields.placing import ModelPlan
from djinn_client.protocol.fields.scheduling import Latency, QuotaUse, ResourceUse, Spread, Why
from djinn_client.session.streaming import Stream
from djinn_client.tensors.cache import Cache
from djinn_client.tensors.hits import Hit
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.version import __version__
from djinn_client.whitebox.breakpoint_calls import Breakpoint
from djinn_client.whitebox.interventions import Intervention, InterventionContext
from djinn_client.whitebox.probing import Capture, Edit

if TYPE_CHECKING:
    from djinn_client.api.aio import AsyncSession, AsyncStream
    from djinn_client.api.aio_client import AsyncClient
    from djinn_client.handover.sharing import ModelHandle, share_model
    from djinn_client.tensors.arrays import as_torch

__all__ = [
    "KV",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Breakpoint",
    "BreakpointInfo",
    "BudgetReply",
    "Busy",
    "Cache",
    "Cancelled",
    "Capture",
    "ChatDelta",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "ConnectionLost",
    "DeviceInfo",
    "DjinnError",
    "Edit",
    "EditInfo",
    "Embeddings",
    "EngineLost",
    "FileDamaged",
    "FilesWanted",
    "FrameTooLarge",
    "FunctionFailed",
    "FunctionNotFound",
    "GenerateOptions",
    "Generated",
    "GrammarRejected",
    "Hit",
    "HitInfo",
    "Intervention",
    "InterventionContext",
    "InvalidRequest",
    "JournalUnavailable",
    "KvLayout",
    "KvWindow",
    "Latency",
    "Logprobs",
    "ModelHandle",
    "ModelInfo",
    "ModelMismatch",
    "ModelNotFound",
    "ModelPlan",
    "ModelRejected",
    "NoTokenizer",
    "NotAuthenticated",
    "NotFound",
    "NotPermitted",
    "OutOfMemory",
    "PauseReply",
    "Piece",
    "PlacingOptions",
    "PrefixInfo",
    "Progress",
    "PromptLogprobs",
    "PromptTooLong",
    "ProtocolError",
    "QuotaExceeded",
    "QuotaUse",
    "Record",
    "RecordInfo",
    "ResourceUse",
    "ResumePoint",
    "Retry",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "SessionLost",
    "SessionNotFound",
    "SessionStateError",
    "ShuttingDown",
    "Span",
    "Spread",
    "StatusReply",
    "Stream",
    "TextFailed",
    "Timings",
    "TokenAdded",
    "TokenInfo",
    "TokenOutOfRange",
    "TokenizerInfo",
    "ToolCall",
    "ToolCallDelta",
    "TraceReply",
    "Usage",
    "VersionMismatch",
    "Why",
    "__version__",
    "as_torch",
    "chat",
    "close",
    "detokenize",
    "embed",
    "generate",
    "kv_window",
    "load",
    "load_session",
    "models",
    "pause",
    "plan",
    "points",
    "quotas",
    "sessions",
    "set_budget",
    "set_priority",
    "share_model",
    "status",
    "tokenize",
    "tokenizer",
    "trace",
    "unload",
    "unpause",
    "why",
]

_LATER = {
    "ModelHandle": "djinn_client.handover.sharing",
    "share_model": "djinn_client.handover.sharing",
    "AsyncClient": "djinn_client.api.aio_client",
    "AsyncSession": "djinn_client.api.aio",
    "AsyncStream": "djinn_client.api.aio",
    "chat_async": "djinn_client.api.aio_client",
    "embed_async": "djinn_client.api.aio_client",
    "generate_async": "djinn_client.api.aio_client",
    "as_torch": "djinn_client.tensors.arrays",
}

_OLD_NAMES = {  # names of the last release, and what they are now
    "Checkpoint": "ResumePoint",
    "attach": "Session.attach",
    "attach_async": "AsyncSession.attach",
    "chat_async": "AsyncClient.chat",
    "embed_async": "AsyncClient.embed",
    "from_kv": "Session.from_kv",
    "from_kv_async": "AsyncSession.from_kv",
    "generate_async": "AsyncClient.generate",
    "resume": "unpause",
}


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        warn_of(f"djinn_client.{name}", _OLD_NAMES[name], stacklevel=2)
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _OLD_NAMES:
        return attrgetter(_OLD_NAMES[name])(sys.modules[__name__])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
