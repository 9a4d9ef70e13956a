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

# The public names are all errors, those imported `as` themselves, and those of _LATER.
from djinn_client.admin.client import Client as Client
from djinn_client.admin.embeddings import Embeddings as Embeddings
from djinn_client.api.client import Session as Session
from djinn_client.api.functions import chat as chat
from djinn_client.api.functions import close as close
from djinn_client.api.functions import detokenize as detokenize
from djinn_client.api.functions import embed as embed
from djinn_client.api.functions import generate as generate
from djinn_client.api.functions import load as load
from djinn_client.api.functions import load_session as load_session
from djinn_client.api.functions import models as models
from djinn_client.api.functions import pause as pause
from djinn_client.api.functions import plan as plan
from djinn_client.api.functions import points as points
from djinn_client.api.functions import quotas as quotas
from djinn_client.api.functions import sessions as sessions
from djinn_client.api.functions import set_budget as set_budget
from djinn_client.api.functions import set_priority as set_priority
from djinn_client.api.functions import status as status
from djinn_client.api.functions import tokenize as tokenize
from djinn_client.api.functions import tokenizer as tokenizer
from djinn_client.api.functions import trace as trace
from djinn_client.api.functions import unload as unload
from djinn_client.api.functions import unpause as unpause
from djinn_client.api.functions import why as why
from djinn_client.arguments.options import ChatOptions as ChatOptions
from djinn_client.arguments.options import GenerateOptions as GenerateOptions
from djinn_client.arguments.options import PlacingOptions as PlacingOptions
from djinn_client.errors import *  # noqa: F403
from djinn_client.handover.kv import KV as KV
from djinn_client.handover.kv import KvWindow as KvWindow
from djinn_client.handover.kv import kv_window as kv_window
from djinn_client.old_names import warn_of
from djinn_client.protocol import AdapterInfo as AdapterInfo
from djinn_client.protocol import BudgetReply as BudgetReply
from djinn_client.protocol import DeviceInfo as DeviceInfo
from djinn_client.protocol import Generated as Generated
from djinn_client.protocol import Logprobs as Logprobs
from djinn_client.protocol import ModelInfo as ModelInfo
from djinn_client.protocol import PauseReply as PauseReply
from djinn_client.protocol import Piece as Piece
from djinn_client.protocol import PrefixInfo as PrefixInfo
from djinn_client.protocol import Progress as Progress
from djinn_client.protocol import PromptLogprobs as PromptLogprobs
from djinn_client.protocol import Record as Record
from djinn_client.protocol import RecordInfo as RecordInfo
from djinn_client.protocol import SessionInfo as SessionInfo
from djinn_client.protocol import Span as Span
from djinn_client.protocol import StatusReply as StatusReply
from djinn_client.protocol import Timings as Timings
from djinn_client.protocol import TokenAdded as TokenAdded
from djinn_client.protocol import TokenInfo as TokenInfo
from djinn_client.protocol import TokenizerInfo as TokenizerInfo
from djinn_client.protocol import TraceReply as TraceReply
from djinn_client.protocol import Usage as Usage
from djinn_client.protocol.fields.breakpoints import BreakpointInfo as BreakpointInfo
from djinn_client.protocol.fields.breakpoints import HitInfo as HitInfo
from djinn_client.protocol.fields.chat import ChatDelta as ChatDelta
from djinn_client.protocol.fields.chat import ChatMessage as ChatMessage
from djinn_client.protocol.fields.chat import ToolCall as ToolCall
from djinn_client.protocol.fields.chat import ToolCallDelta as ToolCallDelta
from djinn_client.protocol.fields.edits import EditInfo as EditInfo
from djinn_client.protocol.fields.kv_layout import KvLayout as KvLayout
from djinn_client.protocol.fields.placing import ModelPlan as ModelPlan
from djinn_client.protocol.fields.scheduling import Latency as Latency
from djinn_client.protocol.fields.scheduling import QuotaUse as QuotaUse
from djinn_client.protocol.fields.scheduling import ResourceUse as ResourceUse
from djinn_client.protocol.fields.scheduling import Spread as Spread
from djinn_client.protocol.fields.scheduling import Why as Why
from djinn_client.session.streaming import Stream as Stream
from djinn_client.tensors.cache import Cache as Cache
from djinn_client.tensors.hits import Hit as Hit
from djinn_client.tensors.resume_points import ResumePoint as ResumePoint
from djinn_client.version import __version__ as __version__
from djinn_client.whitebox.breakpoint_calls import Breakpoint as Breakpoint
from djinn_client.whitebox.interventions import Intervention as Intervention
from djinn_client.whitebox.interventions import InterventionContext as InterventionContext
from djinn_client.whitebox.probing import Capture as Capture
from djinn_client.whitebox.probing import Edit as Edit

if TYPE_CHECKING:
    from djinn_client.api.aio import AsyncSession as AsyncSession
    from djinn_client.api.aio import AsyncStream as AsyncStream
    from djinn_client.api.aio_client import AsyncClient as AsyncClient
    from djinn_client.handover.sharing import ModelHandle as ModelHandle
    from djinn_client.handover.sharing import share_model as share_model
    from djinn_client.remote_model.opening import remote as remote
    from djinn_client.tensors.arrays import as_torch as as_torch

_LATER = {
    "ModelHandle": "djinn_client.handover.sharing",
    "share_model": "djinn_client.handover.sharing",
    "remote": "djinn_client.remote_model.opening",
    "AsyncClient": "djinn_client.api.aio_client",
    "AsyncSession": "djinn_client.api.aio",
    "AsyncStream": "djinn_client.api.aio",
    "chat_async": "djinn_client.api.aio_client",
    "embed_async": "djinn_client.api.aio_client",
    "generate_async": "djinn_client.api.aio_client",
    "as_torch": "djinn_client.tensors.arrays",
}

_OLD_NAMES = {  # names of the last release, and their new names
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
    return sorted({*globals(), *_LATER} - _OLD_NAMES.keys())
