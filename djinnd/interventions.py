"""What server and intervention processes say to each other, in the frames of djinn_client.protocol.

    server ──Load──► process ──Done | Failed──► server
           ──Run, with the window──► ──Changed, as often as needed, then Done | Failed──►
           ──Forget──►

The process's first word is Ready or Unfit. What comes from it later may be a function's own work, and is believed no
more than what clients say.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.breakpoints import HitInfo
from djinn_client.edits import Captured
from djinn_client.protocol import AddEdit, decoded, framed

Key = tuple[str, int]  # a function's: the session, and the number of its breakpoint

MAX_FRAME = 16 << 20  # bytes, either way


class Load(msgspec.Struct, tag="load"):
    """In the place of the one that has this key. `point`: as the breakpoint names it."""

    function: Key
    point: str
    code: bytes  # cloudpickle


class Run(msgspec.Struct, tag="run"):
    """These functions, one after another, of one session, on what is in the window that comes with this."""

    functions: list[Key]
    hit: HitInfo
    captured: Captured


class Forget(msgspec.Struct, tag="forget"):
    """Without an answer."""

    functions: list[Key]


class Ready(msgspec.Struct, tag="ready"):
    """The sandbox is closed."""


class Unfit(msgspec.Struct, tag="unfit"):
    """It cannot be closed, and the process ends."""

    lacking: str


class Changed(msgspec.Struct, tag="changed"):
    edit: AddEdit


class Done(msgspec.Struct, tag="done"):
    pass


class Failed(msgspec.Struct, tag="failed"):
    """The process goes on."""

    code: Literal["function_failed", "invalid_request"]
    message: str


ToProcess = Load | Run | Forget
FromProcess = Ready | Unfit | Changed | Done | Failed

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
