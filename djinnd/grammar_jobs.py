"""What an engine and a grammar process say to each other, in the frames of djinn_client.protocol.

    engine ──Begin──────────────► process ──States, with the first mask──► engine
           ──Advance, once a step──►      ──States─────────────────────────►
           ──End─────────────────►

The masks themselves lie in memory that both have mapped: a slot a run, with a bit for each token, 1 where it may
follow. A slot is written between the message that a state answers and that state, and is read until the next message
about its run.
"""

from __future__ import annotations

import msgspec

from djinn_client.protocol import decoded, framed

MAX_FRAME = 64 << 20  # bytes: a grammar, and the tokens of an output that goes on
SLOTS = 4096  # runs that one process has at a time
WORD = 32  # tokens of one word of a mask
_LINE = 16  # words


def words_of(vocab: int) -> int:
    """Of a slot: whole 64 bytes, so that no two threads write to one line of memory."""
    return _LINE * -(-vocab // (_LINE * WORD))


# --- engine to process ------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """A run whose output follows the grammar, and has these tokens already."""

    run: int
    slot: int
    grammar: str
    tokens: list[int]


class Advance(msgspec.Struct, tag="advance", array_like=True):
    """Each run's next token. Tokens that a state has called `forced` are not told again."""

    tokens: list[tuple[int, int]]


class End(msgspec.Struct, tag="end", array_like=True):
    run: int


# --- process to engine ------------------------------------------------------------------------------------------------


class State(msgspec.Struct, array_like=True):
    """`forced`: the tokens that come next, whatever the model says; the mask is of what follows them. `ended`: behind
    those, nothing can follow. `error`: why the grammar cannot be followed any more; the run is over then."""

    run: int
    forced: list[int] = []
    ended: bool = False
    error: str = ""


class States(msgspec.Struct, tag="states", array_like=True):
    """`plain`: runs of which there is nothing to say but that their masks are there. They are most, and an engine reads
    their numbers between two steps."""

    plain: list[int] = []
    others: list[State] = []


ToProcess = Begin | Advance | End

_encode = msgspec.msgpack.Encoder().encode
_to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
_to_engine: msgspec.msgpack.Decoder[States] = msgspec.msgpack.Decoder(States)


def encode(message: ToProcess | States) -> bytes:
    return framed(_encode(message), 0)


def decode_to_process(payload: bytes) -> ToProcess:
    return decoded(_to_process, payload)


def decode_to_engine(payload: bytes) -> States:
    """Raises ProtocolError."""
    return decoded(_to_engine, payload)
