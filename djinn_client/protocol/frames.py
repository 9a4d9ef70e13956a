"""The wire contract: frames and messages, without any I/O. Both clients, the server and the fuzzer use this module.

A connection is a stream of frames in both directions:

    byte 0      2         3      4             8
         ┌──────┬─────────┬──────┬─────────────┬──────────────────────────┐
         │ "DJ" │ version │ fds  │ length (BE) │ payload: msgpack, typed  │
         └──────┴─────────┴──────┴─────────────┴──────────────────────────┘

`fds` says how many file descriptors travel with the frame (SCM_RIGHTS with the frame's first byte; never more than
MAX_FDS). The first frame of a client is `Hello`. Every request carries an `id` chosen by the client; the server answers
it with any number of `Progress` and `Piece` frames and then exactly one final reply: a result or a `Failure`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, TypeGuard, TypeVar

import msgspec

from djinn_client.errors import FrameTooLarge, ProtocolError, VersionMismatch
from djinn_client.protocol import replies, requests
from djinn_client.protocol.fields import signals
from djinn_client.protocol.fields.bounds import LARGE, PACKED_FROM, expect_few_values, pack, unpack, whole_at

VERSION = 1
MAGIC = b"DJ"
HEADER = struct.Struct(">2sBBI")
MAX_FDS = 240  # the kernel takes 253 at once
MAX_REQUEST = 16 << 20  # bytes of a frame that a client may send
MAX_REPLY = 256 << 20  # bytes of a frame that a server may send
MAX_TOLD = 500  # characters of an error message

_ID = b"\xa2id"  # as a key of msgpack
_ID_FIELD = len(_ID) + 9  # bytes, at the most
_ID_BEFORE = 64

T = TypeVar("T")


class Frame(msgspec.Struct, frozen=True):
    payload: bytes
    fds: int


class FrameDecoder:
    """Bytes in, frames out. After an error the stream cannot be resynchronised: the connection must be closed."""

    def __init__(self, limit: int, max_fds: int = MAX_FDS) -> None:
        self.limit = limit
        self._max_fds = max_fds
        self.announced = 0  # bytes of the payload of the unfinished frame, as its header says
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yields each frame that `data` completes.

        Raises ProtocolError when the bytes are not a frame, VersionMismatch, or FrameTooLarge as soon as the header
        that announces such a frame has come.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            magic, version, fds, length = HEADER.unpack_from(self._buffer)
            if magic != MAGIC:
                raise ProtocolError(f"these bytes are not djinnd's protocol: {bytes(self._buffer[:8])!r}")
            if version != VERSION:
                raise VersionMismatch(
                    f"the peer speaks protocol version {version}, this side speaks {VERSION}: update the older one",
                    theirs=version,
                    ours=VERSION,
                )
            if fds > self._max_fds:
                raise ProtocolError(f"a frame announces {fds} file descriptors, the limit is {self._max_fds}")
            if length > self.limit:
                raise FrameTooLarge(
                    f"a frame of {length:,} bytes is over the limit of {self.limit:,}", length=length, limit=self.limit
                )
            end = HEADER.size + length
            if len(self._buffer) < end:
                self.announced = length
                return
            self.announced = 0
            payload = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(payload, fds)

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame; more than zero at end of stream means that the frame was truncated."""
        return len(self._buffer)


def union_of(*bases: type[msgspec.Struct]) -> Any:
    """Returns the union of all messages below these base classes, or of a class itself if there is none below it. The
    modules of the messages have been imported. A message has a tag; classes that are derived from one do not count."""
    return reduce(or_, chain.from_iterable(list(_messages_below(base)) or [base] for base in bases))


def _messages_below(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in base.__subclasses__():
        if each.__struct_config__.tag is None:
            yield from _messages_below(each)
        else:
            yield each


ClientMessage = requests.Request | requests.Cancel | signals.Signal
ServerMessage = replies.Reply
BringsTokens = requests.Generate | requests.Forward | requests.ImportSession | requests.Detokenize
_BRINGS_TOKENS = frozenset(BringsTokens.__args__)  # isinstance asks a Struct's metaclass, and takes ten times as long
Partial = replies.Progress | replies.Piece  # the replies that are not final

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(union_of(*ClientMessage.__args__))
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(union_of(ServerMessage))


class _OnlyId(msgspec.Struct):
    id: int


_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


def encode(message: ClientMessage | ServerMessage, fds: int = 0) -> bytes:
    """One frame, header and payload."""
    return framed(_encoder.encode(message), fds)


def framed(payload: bytes, fds: int = 0) -> bytes:
    return HEADER.pack(MAGIC, VERSION, fds, len(payload)) + payload


def decode_request(payload: bytes) -> ClientMessage:
    """Raises ProtocolError with msgspec's account of what is wrong and where."""
    if len(payload) > LARGE:
        expect_few_values(payload)
    message = decoded(_client_decoder, payload)
    if brings_tokens(message) and message.packed_ids:
        if message.token_ids:
            raise ProtocolError("token ids came as a list and as bytes")
        message.token_ids, message.packed_ids = unpack(message.packed_ids), b""
    return message


def brings_tokens(message: object) -> TypeGuard[BringsTokens]:
    return type(message) in _BRINGS_TOKENS


def packed(message: requests.Request | signals.Signal) -> requests.Request | signals.Signal:
    """The same request with many token ids as bytes. Values that are no token ids stay as they are, and are refused."""
    if not brings_tokens(message) or len(message.token_ids or ()) < PACKED_FROM:
        return message
    try:
        packed_ids = pack(message.token_ids or [])
    except (OverflowError, TypeError):
        return message
    nothing: list[int] | None = None if isinstance(message, requests.Generate) else []
    return msgspec.structs.replace(message, token_ids=nothing, packed_ids=packed_ids)


def decode_reply(payload: bytes) -> ServerMessage:
    return decoded(_server_decoder, payload)


def decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Raises ProtocolError."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        told = str(error)  # it may quote the sender's text
        raise ProtocolError(f"a message that this side does not understand: {told[:MAX_TOLD]}") from error


def request_id_of(payload: bytes) -> int | None:
    """The `id` of a request that did not decode, for the reply to its sender; None if there is none. A large request is
    not searched: its id is among the first fields, or the last one, as this module writes it."""
    if len(payload) > LARGE:
        at = max(payload.find(_ID, 0, _ID_BEFORE), payload.rfind(_ID, len(payload) - _ID_FIELD))
        return None if at < 0 else whole_at(payload, at + len(_ID))
    try:
        return _id_decoder.decode(payload).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
