"""Messages between the server and an intervention process, in the frames of djinn_client.protocol.

    server ──LoadFunction──────────────────► process ──FunctionsDone | FunctionsFailed──► server
           ──CallFunctions, with the window──►        ──FunctionEdits, then FunctionsDone | FunctionsFailed──►
           ──ForgetFunctions──►

The first message of the process is FunctionsReady. Later messages may have been forged by a tenant's
function, so the server trusts them no more than messages of clients.
"""

from __future__ import annotations

from functools import partial
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
    """Drops functions. This message has no answer."""

    functions: list[Key]


class FunctionsReady(msgspec.Struct, tag="ready"):
    """The process has confined itself. With `lacking` it could not, and ends."""

    lacking: str = ""  # the feature of the sandbox that this machine lacks; "" if none


class FunctionEdit(msgspec.Struct, tag="changed"):
    """One edit that makes the change of the functions."""

    edit: AddEdit


class FunctionsDone(msgspec.Struct, tag="done"):
    """The functions are loaded, or have all been called."""


class FunctionsFailed(msgspec.Struct, tag="failed"):
    """Loading a function or calling the functions failed. The process goes on."""

    code: Literal["function_failed", "invalid_request"]
    message: str


ToProcess = LoadFunction | CallFunctions | ForgetFunctions
FromProcess = FunctionsReady | FunctionEdit | FunctionsDone | FunctionsFailed

_encode = msgspec.msgpack.Encoder().encode


def encode(message: ToProcess | FromProcess, fds: int = 0) -> bytes:
    return framed(_encode(message), fds)


# These raise ProtocolError for a message that is not of the protocol.
decode_to_process = partial(decoded, msgspec.msgpack.Decoder[ToProcess](ToProcess))
decode_from_process = partial(decoded, msgspec.msgpack.Decoder[FromProcess](FromProcess))
