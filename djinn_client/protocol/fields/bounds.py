"""Bounds of messages, so that decoding takes milliseconds for any message that a sender makes up.

Each field of a request has a bound in its type. These do not bound the work: a field may come many times, and unknown
fields are skipped. So a LARGE message is looked through first. It must have few values, and be large only because of a
text or bytes in one of the LONG_FIELDS. Long lists of token ids travel as bytes.
"""

from __future__ import annotations

from array import array
from typing import Annotated

from msgspec import Meta

from djinn_client.errors import ProtocolError

MAX_NAME = 4096  # characters of a name: a path is one, too
MAX_LIST = 1 << 15
MAX_TOKENS = 1 << 20  # of one request
LARGE = 256 << 10  # bytes of a message
MAX_VALUES = MAX_LIST + 1024  # of a large message: numbers, texts, lists, pairs
MAX_TEXT = 64 << 10  # bytes in a large message, but for LONG_FIELDS
LONG_FIELDS = (
    b"text",
    b"code",
    b"values",
    b"packed_ids",
    b"body",
    b"messages",
    b"tools",
    b"arguments",
    b"chat_template",
)
PACKED_FROM = 4096  # token ids that travel as bytes

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Names = Annotated[list[Name], Meta(max_length=MAX_LIST)]
Wholes = Annotated[list[Whole], Meta(max_length=MAX_LIST)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenList = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
PackedTokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]  # 32 bits each, little-endian

# msgpack: first byte → bytes of the length that follows, and the unit of that length
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}


def expect_few_values(data: bytes) -> None:
    """Raises ProtocolError for a large message that would take long to decode. A message that is cut short passes:
    decoding tells that at once."""
    at, left, seen, last = 0, 1, 0, b""
    while left and at < len(data):
        if seen + left > MAX_VALUES:
            raise ProtocolError(
                f"a message of more than {LARGE >> 10} KiB has more than {MAX_VALUES:,} values: send the tokens of a "
                "long prompt as packed_ids, and other lists in parts"
            )
        seen, left = seen + 1, left - 1
        inside, at, size = _head(data, at)
        left += inside
        if size > MAX_TEXT and last not in LONG_FIELDS:
            raise ProtocolError(f"a value has {size:,} bytes; only {b', '.join(LONG_FIELDS).decode()} may be that long")
        last = data[at : at + size] if size <= MAX_NAME else b""
        at += size


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """→ how many values are inside the value there, where its own bytes begin, and how many they are."""
    byte, at = data[at], at + 1
    if byte < 0x80 or byte >= 0xE0:
        return 0, at, 0
    if byte < 0x90:
        return 2 * (byte & 15), at, 0
    if byte < 0xA0:
        return byte & 15, at, 0
    if byte < 0xC0:
        return 0, at, byte & 31
    if (width := _SIZED.get(byte)) is not None:
        is_typed = 0xC7 <= byte <= 0xC9  # one byte has its type
        return 0, at + width + is_typed, int.from_bytes(data[at : at + width], "big")
    if (width := _LISTS.get(byte)) is not None:
        return int.from_bytes(data[at : at + width], "big"), at + width, 0
    if (width := _MAPS.get(byte)) is not None:
        return 2 * int.from_bytes(data[at : at + width], "big"), at + width, 0
    return 0, at, _FIXED.get(byte, 0)


def whole_at(data: bytes, at: int) -> int | None:
    """The whole number that begins there; None if something else begins there."""
    byte = data[at] if at < len(data) else 0xC1
    if byte < 0x80:
        return byte
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(byte)
    return None if width is None else int.from_bytes(data[at + 1 : at + 1 + width], "big")


def pack(token_ids: list[int]) -> bytes:
    """Raises OverflowError, TypeError for what is no token id."""
    packed = array("i", token_ids)
    if _IS_BIG:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Raises ProtocolError."""
    if len(packed) % 4:
        raise ProtocolError(f"packed_ids has {len(packed):,} bytes, which is no multiple of 4")
    if not packed[3::4].isascii():
        raise ProtocolError("packed_ids has a negative number, or one of 2^31 or more")
    token_ids = array("i", packed)
    if _IS_BIG:
        token_ids.byteswap()
    return token_ids.tolist()


_IS_BIG = array("i", [1]).tobytes()[0] == 0
