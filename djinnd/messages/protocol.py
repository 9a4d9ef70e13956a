"""All messages by direction, and their encoding: one message a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from djinn_client.errors import ProtocolError
from djinn_client.files.model_files import MAX_FILES
from djinn_client.protocol import framed
from djinnd.messages import arenas, engine, figures, inspections, models, runs, scheduling, sessions

ToEngine = (
    engine.SetBudget
    | engine.Shutdown
    | models.Load
    | models.Unload
    | models.Plan
    | models.DescribeImage
    | inspections.DescribeDevice
    | models.PublicPrefix
    | arenas.ArenaReady
    | arenas.ArenaRefused
    | sessions.Open
    | sessions.Fork
    | sessions.Close
    | sessions.Truncate
    | sessions.AddEdit
    | sessions.EndEdits
    | sessions.ExportKv
    | sessions.ImportKv
    | runs.Run
    | runs.CancelRun
    | runs.Halt
    | runs.Hold
    | scheduling.SetClass
    | scheduling.Signal
    | scheduling.Pause
    | scheduling.Resume
    | scheduling.SetTenants
    | scheduling.SetPolicy
    | scheduling.Explain
    | figures.Inquire
    | figures.Trace
)

FromEngine = (
    engine.Ready
    | engine.Alive
    | engine.BudgetSet
    | engine.Failed
    | models.Loading
    | models.Loaded
    | models.Unloaded
    | models.Planned
    | models.ImageDescribed
    | inspections.DeviceDescribed
    | arenas.NeedArena
    | arenas.ArenaFilled
    | arenas.HostReleased
    | runs.Recomputed
    | runs.GrammarTime
    | sessions.KvExported
    | runs.Stepping
    | runs.Stepped
    | runs.Finished
    | runs.LogitsReady
    | runs.PromptScored
    | scheduling.Paused
    | scheduling.Explained
    | figures.Report
    | figures.Traced
)

MAX_FRAME = 256 << 20
MAX_FDS = MAX_FILES  # most descriptors with a frame to the engine: the files of a checkpoint

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine, fds: int = 0) -> bytes:
    return framed(_encoder.encode(message), fds)


def decode_to_engine(payload: bytes, fds: Sequence[int] = ()) -> ToEngine:
    """`fds`: the descriptors that came with the frame. The message owns them."""
    message: ToEngine = _decode(_to_engine, payload)
    if isinstance(message, arenas.ArenaReady | sessions.ImportKv):
        (message.fd,) = fds or (-1,)
    elif isinstance(message, models.Load | models.Plan | models.DescribeImage):
        message.fds = list(fds)
    elif fds:
        assert type(message) is runs.Run and message.grammar is not None, message
        (message.grammar.fd,) = fds
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    message: FromEngine = _decode(_from_engine, payload)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:  # the two processes run different versions
        raise ProtocolError(f"server and engine disagree: {error}") from error
