"""Parses the header of a GGUF file: its metadata, and its tensors with their places in the file.

    byte 0        4         8              16             24
         ┌────────┬─────────┬──────────────┬──────────────┬──────────────┬───────────────┬─────┬────────┬────────┬───
         │ "GGUF" │ version │ tensor count │ value count  │ metadata:    │ tensors: name,│ pad │ tensor │ tensor │ …
         │        │ 2 or 3  │              │              │ key, type, … │ shape, format │     │        │        │
         └────────┴─────────┴──────────────┴──────────────┴──────────────┴───────────────┴─────┴────────┴────────┴───
                                     all numbers are little-endian        each tensor starts on `general.alignment` ▲

The bytes may be hostile. Every count is compared with a limit before anything is read for it, and the header as a whole
has at most MAX_HEADER bytes, which are read in pieces as the parser goes on. Arrays are skipped, and decoded only on
demand. This module is pure: a function that reads bytes goes in, values come out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from djinnd.gguf.formats import FORMATS

MAGIC = b"GGUF"
MAX_HEADER = 64 << 20  # bytes; that of Gemma 3, with 262,144 tokens, has 6 MiB
MAX_VALUES = 4096  # of the metadata
MAX_KEY = 256  # bytes; the specification allows 65,535, and no writer uses more than 64
MAX_STRING = 4 << 20  # bytes of one value, such as a chat template
MAX_TOKEN = 4096  # bytes of a string inside of an array
MAX_ARRAY = 1 << 21  # elements
MAX_TENSORS = 1 << 17  # in one file
MAX_NAME = 256  # bytes of a tensor's name; ggml allows 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
_PIECE = 4 << 20  # bytes that are read at a time

Read = Callable[[int, int], bytes]  # (offset, count) → bytes, fewer where the file ends

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_COUNT, _TYPE = _NUMBERS[10], _NUMBERS[4]


class BadGguf(ValueError):
    """The bytes are no whole GGUF file of a kind that djinnd reads. `tensor`: the tensor at fault, if there is one."""

    def __init__(self, reason: str, tensor: str = "") -> None:
        super().__init__(reason)
        self.tensor = tensor


class GgufTensor(NamedTuple):
    """A tensor of the file. `shape` has torch's order: rows before columns."""

    shape: tuple[int, ...]
    format: int  # of FORMATS, or an id that djinnd does not know
    start: int  # byte offset in the file
    nbytes: int  # 0 for an unknown format


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of the metadata that was skipped. `start` and `end` are offsets of its elements in the header."""

    kind: int
    count: int
    start: int
    end: int


class Header:
    """The parsed header of one file. It keeps the header's bytes and decodes arrays on demand."""

    def __init__(self, read: Read, file_bytes: int) -> None:
        """Raises BadGguf. Reads at most MAX_HEADER bytes and a piece more."""
        cursor = _Cursor(read)
        if cursor.take(4) != MAGIC:
            raise BadGguf("it does not begin with GGUF")
        version = cursor.number(_TYPE)
        if version not in (2, 3):
            big = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
            raise BadGguf(f"its version is {version}{big}; versions 2 and 3, little-endian, are read")
        tensors, values = cursor.number(_COUNT), cursor.number(_COUNT)
        _at_most(tensors, MAX_TENSORS, "tensors")
        _at_most(values, MAX_VALUES, "values of metadata")
        self.metadata: dict[str, Any] = {}  # without arrays
        self._arrays: dict[str, _Array] = {}
        for _ in range(values):
            self._read_value(cursor)
        self._bytes = cursor
        self.tensors = self._read_tensors(cursor, tensors, file_bytes)

    def _read_value(self, cursor: _Cursor) -> None:
        key, kind = cursor.string(MAX_KEY, "key"), cursor.number(_TYPE)
        if key in self.metadata or key in self._arrays:
            raise BadGguf(f"its metadata have {key} twice")
        if kind in _NUMBERS:
            self.metadata[key] = cursor.number(_NUMBERS[kind])
        elif kind == _STRING:
            self.metadata[key] = cursor.string(MAX_STRING, key)
        elif kind == _ARRAY:
            self._arrays[key] = _skip_array(cursor, key)
        else:
            raise BadGguf(f"{key} has a value of the unknown type {kind}")

    def _read_tensors(self, cursor: _Cursor, count: int, file_bytes: int) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise BadGguf(f"general.alignment is {alignment!r}; it may be from 1 to {MAX_ALIGNMENT:,}")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = cursor.string(MAX_NAME, "a tensor's name")
            dimensions = cursor.number(_TYPE)
            _at_most(dimensions, MAX_DIMENSIONS, f"dimensions of tensor {name[:80]}")
            shape = tuple(reversed([cursor.number(_COUNT) for _ in range(dimensions)]))
            kind, offset = cursor.number(_TYPE), cursor.number(_COUNT)
            if name in entries:
                raise BadGguf(f"tensor {name[:80]} is there twice", name)
            if offset % alignment:
                raise BadGguf(f"tensor {name[:80]} starts at {offset:,}, no multiple of {alignment}", name)
            entries[name] = (shape, kind, offset)
        first = -(-cursor.offset // alignment) * alignment
        tensors = {name: _tensor(name, *entry, first) for name, entry in entries.items()}
        _check_places(tensors, file_bytes)
        return tensors

    # --- arrays -----------------------------------------------------------------------------------------------------

    def count(self, key: str) -> int | None:
        """The length of an array of the metadata; None if there is no such array."""
        array = self._arrays.get(key)
        return None if array is None else array.count

    def numbers(self, key: str) -> list[Any] | None:
        """An array of numbers; None if there is none. Raises BadGguf if it holds strings."""
        array = self._arrays.get(key)
        if array is None:
            return None
        if array.kind not in _NUMBERS:
            raise BadGguf(f"{key} is an array of strings, not of numbers")
        code = _NUMBERS[array.kind].format[1:]
        return list(struct.unpack_from(f"<{array.count}{code}", self._bytes.buffer, array.start))

    def strings(self, key: str) -> list[str] | None:
        """An array of strings; None if there is none. Raises BadGguf if it holds numbers, or no UTF-8."""
        array = self._arrays.get(key)
        if array is None:
            return None
        if array.kind != _STRING:
            raise BadGguf(f"{key} is an array of numbers, not of strings")
        found, place, buffer = [], array.start, self._bytes.buffer
        for _ in range(array.count):
            (length,) = _COUNT.unpack_from(buffer, place)
            place += 8 + length
            found.append(_text(buffer[place - length : place], key))
        return found


class _Cursor:
    """A place in the header, and the bytes that have been read so far."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.buffer = bytearray()
        self.offset = 0

    def reach(self, count: int) -> int:
        """Reads on until `count` more bytes are there, and goes behind them. → their offset. Raises BadGguf."""
        start, self.offset = self.offset, self.offset + count
        if self.offset > MAX_HEADER:
            raise BadGguf(f"its header has more than {MAX_HEADER:,} bytes")
        while len(self.buffer) < self.offset:
            piece = self._read(len(self.buffer), _PIECE)
            if not piece:
                raise BadGguf(f"it ends after {len(self.buffer):,} bytes, inside of its header")
            self.buffer += piece
        return start

    def take(self, count: int) -> bytes:
        start = self.reach(count)
        return bytes(self.buffer[start : self.offset])

    def number(self, form: struct.Struct) -> Any:
        start = self.reach(form.size)
        return form.unpack_from(self.buffer, start)[0]

    def string(self, limit: int, what: str) -> str:
        length = self.number(_COUNT)
        _at_most(length, limit, f"bytes in {what[:80]}")
        return _text(self.take(length), what)


def _skip_array(cursor: _Cursor, key: str) -> _Array:
    kind, count = cursor.number(_TYPE), cursor.number(_COUNT)
    _at_most(count, MAX_ARRAY, f"elements of {key}")
    start = cursor.offset
    if kind in _NUMBERS:
        cursor.reach(count * _NUMBERS[kind].size)
    elif kind == _STRING:
        for _ in range(count):
            length = cursor.number(_COUNT)
            _at_most(length, MAX_TOKEN, f"bytes in a string of {key}")
            cursor.reach(length)
    else:
        raise BadGguf(f"{key} is an array of the type {kind}, which is not read")
    return _Array(kind, count, start, cursor.offset)


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, first: int) -> GgufTensor:
    form = FORMATS.get(kind)
    if form is None:
        return GgufTensor(shape, kind, first + offset, 0)
    if shape and shape[-1] % form.weights:
        told = f"rows of tensor {name[:80]} have {shape[-1]:,} numbers, no whole blocks of {form.name}"
        raise BadGguf(told, name)
    return GgufTensor(shape, kind, first + offset, math.prod(shape) // form.weights * form.nbytes)


def _check_places(tensors: dict[str, GgufTensor], file_bytes: int) -> None:
    """Raises BadGguf if two tensors share bytes, or one ends behind the file's end."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise BadGguf(f"tensor {name[:80]} overlaps another one", name)
        end = tensor.start + tensor.nbytes
        if end > file_bytes:
            told = f"tensor {name[:80]} ends at byte {end:,}, but the file has {file_bytes:,}"
            raise BadGguf(told, name)


def _at_most(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise BadGguf(f"it has {count:,} {what}; at most {limit:,} are read")


def _text(data: bytes | bytearray, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadGguf(f"{what[:80]} is no UTF-8: {error.reason}") from error
