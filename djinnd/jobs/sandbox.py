"""Messages between the server and an intervention process, in the frames of djinn_client.protocol.

    server ──Load──► process ──Done | Failed──► server
           ──Run, with the window──► ──Changed, as often as needed, then Done | Failed──►
           ──Forget──►

The first message of the process is Ready or ConfinementFailed. Later messages may have been forged by a tenant's
function, so the server trusts them no more than messages of clients.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.protocol import AddEdit, decoded, framed
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured

Key = tuple[str, int]  # of a function: its session and the number of its breakpoint

MAX_FRAME = 16 << 20  # bytes, in either direction


class LoadFunction(msgspec.Struct, tag="load"):
    """Loads a function. Replaces an earlier function with this key."""

    function: Key
    point: str  # the breakpoint's name of the point
    code: bytes  # pickled by cloudpickle


class CallFunctions(msgspec.Struct, tag="run"):
    """Calls functions of one session, one after another, with the activation in the window that comes with this
    message."""

    functions: list[Key]
    hit: HitInfo
    captured: Captured


class ForgetFunctions(msgspec.Struct, tag="forget"):
    """Drops functions. Has no answer."""

    functions: list[Key]


class FunctionsReady(msgspec.Struct, tag="ready"):
    """The process has confined itself."""


class ConfinementFailed(msgspec.Struct, tag="unfit"):
    """The process cannot confine itself, and ends."""

    lacking: str  # the missing feature of the machine


class FunctionEdit(msgspec.Struct, tag="changed"):
    """One edit that makes the change of the functions."""

    edit: AddEdit


class FunctionsDone(msgspec.Struct, tag="done"):
    """The Load or Run is complete."""


class FunctionsFailed(msgspec.Struct, tag="failed"):
    """The Load or Run failed. The process goes on."""

    code: Literal["function_failed", "invalid_request"]
    message: str


ToProcess = LoadFunction | CallFunctions | ForgetFunctions
FromProcess = FunctionsReady | ConfinementFailed | FunctionEdit | FunctionsDone | FunctionsFailed

_encode = msgspec.msgpack.Encoder().encode
_to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
_from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)


def encode(message: ToProcess | FromProcess, fds: int = 0) -> bytes:
    return framed(_encode(message), fds)


def decode_to_process(payload: bytes) -> ToProcess:
    return decoded(_to_process, payload)


def decode_from_process(payload: bytes) -> FromProcess:
    """Raises ProtocolError."""
    return decoded(_from_process, payload)
