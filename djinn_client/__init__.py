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
from typing import TYPE_CHECKING, Any

from djinn_client.admin.daemon_calls import Client
from djinn_client.admin.embeddings import Embeddings
from djinn_client.api.client import Session, attach, from_kv
from djinn_client.api.functions import (
    chat,
    close,
    detokenize,
    embed,
    generate,
    load,
    models,
    pause,
    plan,
    points,
    quotas,
    resume,
    sessions,
    set_budget,
    set_priority,
    status,
    tokenize,
    tokenizer,
    trace,
    unload,
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
    ShuttingDown,
    TextFailed,
    TokenOutOfRange,
    VersionMismatch,
)
from djinn_client.handover.kv import KV, KvWindow, kv_window
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
from djinn_client.tensors.checkpoints import Checkpoint
from djinn_client.tensors.hits import Hit
from djinn_client.version import __version__
from djinn_client.whitebox.breakpoint_calls import Breakpoint
from djinn_client.whitebox.interventions import Intervention, InterventionContext
from djinn_client.whitebox.probing import Capture, Edit

if TYPE_CHECKING:
    from djinn_client.api.aio import AsyncSession, AsyncStream, attach_async, from_kv_async
    from djinn_client.api.aio_calls import chat_async, embed_async, generate_async
    from djinn_client.handover.sharing import ModelHandle, share_model
    from djinn_client.tensors.arrays import as_torch

__all__ = [
    "KV",
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
    "Checkpoint",
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
    "Retry",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "SessionLost",
    "SessionNotFound",
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
    "attach",
    "attach_async",
    "chat",
    "chat_async",
    "close",
    "detokenize",
    "embed",
    "embed_async",
    "from_kv",
    "from_kv_async",
    "generate",
    "generate_async",
    "kv_window",
    "load",
    "models",
    "pause",
    "plan",
    "points",
    "quotas",
    "resume",
    "sessions",
    "set_budget",
    "set_priority",
    "share_model",
    "status",
    "tokenize",
    "tokenizer",
    "trace",
    "unload",
    "why",
]

_LATER = {
    "ModelHandle": "djinn_client.handover.sharing",
    "share_model": "djinn_client.handover.sharing",
    "AsyncSession": "djinn_client.api.aio",
    "AsyncStream": "djinn_client.api.aio",
    "attach_async": "djinn_client.api.aio",
    "from_kv_async": "djinn_client.api.aio",
    "chat_async": "djinn_client.api.aio_calls",
    "embed_async": "djinn_client.api.aio_calls",
    "generate_async": "djinn_client.api.aio_calls",
    "as_torch": "djinn_client.tensors.arrays",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
