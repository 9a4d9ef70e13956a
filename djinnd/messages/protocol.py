"""The encoding of messages: one message a frame."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from djinn_client.files.model_files import MAX_FILES
from djinn_client.protocol import decoded, framed, union_of
from djinnd.messages import (  # all modules with messages: the decoders know the classes that exist by then
    adapters,
    arenas,
    engine,  # noqa: F401
    figures,  # noqa: F401
    inspections,  # noqa: F401
    models,
    runs,
    scheduling,  # noqa: F401
    sessions,
)
from djinnd.messages.directions import FromEngine, ToEngine

MAX_FRAME = 256 << 20
MAX_FDS = MAX_FILES  # most descriptors with a frame to the engine: the files of a checkpoint

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(union_of(ToEngine))
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(union_of(FromEngine))


def encode(message: ToEngine | FromEngine, fds: int = 0) -> bytes:
    return framed(_encoder.encode(message), fds)


def decode_to_engine(payload: bytes, fds: Sequence[int] = ()) -> ToEngine:
    """`fds`: the descriptors that came with the frame. The message owns them."""
    message = decoded(_to_engine, payload)
    if isinstance(message, arenas.ArenaReady | sessions.ImportKv):
        (message.fd,) = fds or (-1,)
    elif isinstance(message, models.CheckpointCall | adapters.LoadAdapter):
        message.fds = list(fds)
    elif fds:
        assert type(message) is runs.Run and message.grammar is not None, message
        (message.grammar.fd,) = fds
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises ProtocolError if the two processes run different versions."""
    return decoded(_from_engine, payload)
