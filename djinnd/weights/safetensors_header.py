"""Parses the header of a safetensors file: its tensors and their places in the file.

    byte 0        8               8 + N                                file's end
         ┌────────┬───────────────┬──────────┬──────────┬───────────────────────┐
         │ N (LE) │ JSON: N bytes │ tensor   │ tensor   │ …  no gap, no overlap │
         └────────┴───────────────┴──────────┴──────────┴───────────────────────┘

The JSON has an entry for each tensor: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, with offsets from the
start of the first tensor. It may also have "__metadata__", which is ignored. This module is pure: bytes in, tensors
out.

The bytes may be hostile, so all that grows with them is bounded. A call into C code holds the GIL, so each call either
scans the whole header without building its values, or decodes one entry of at most MAX_ENTRY bytes.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated, NamedTuple

import msgspec

PREFIX = 8  # bytes before the JSON
MAX_HEADER = 32 << 20  # bytes; 160,000 tensors have some 20 MiB
MAX_ENTRY = 4096  # bytes of JSON for one tensor
MAX_TENSORS = 1 << 18  # in one file
MAX_DIMENSIONS = 16

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class HeaderEntry(NamedTuple):
    """The dtype, shape and place of a tensor in its file."""

    dtype: str  # name in safetensors; a dtype that is not in BITS is passed on, and its size is not checked
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    nbytes: int


class BadHeader(ValueError):
    """The bytes are not a complete safetensors file. `tensor`: the tensor at fault, if there is a single one."""

    def __init__(self, reason: str, tensor: str = "") -> None:
        super().__init__(reason)
        self.tensor = tensor


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_NotNegative, ...]
    data_offsets: tuple[_NotNegative, _NotNegative]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """N, the length of the JSON, from the file's first bytes. Raises BadHeader if it does not fit the file's size."""
    if len(prefix) < PREFIX:
        raise BadHeader(f"it has only {len(prefix)} bytes")
    (size,) = struct.unpack_from("<Q", prefix)
    if size > file_bytes - PREFIX:
        raise BadHeader(f"its header would have {size:,} bytes, but the file has {file_bytes:,}")
    if size > MAX_HEADER:
        raise BadHeader(f"its header has {size:,} bytes; at most {MAX_HEADER:,} are read")
    return int(size)


def parse_header(header: bytes, file_bytes: int) -> dict[str, HeaderEntry]:
    """name → tensor, from the JSON of a file of `file_bytes` bytes. Raises BadHeader."""
    try:
        entries = _header.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHeader(f"its header is not a JSON object: {error}") from error
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise BadHeader(f"it has {len(entries):,} tensors; at most {MAX_TENSORS:,} are read")
    first = PREFIX + len(header)
    tensors = {name: _stored(name, raw, first) for name, raw in entries.items()}
    _check_whole(tensors, first, file_bytes)
    return tensors


def _stored(name: str, raw: msgspec.Raw, first: int) -> HeaderEntry:
    if len(raw) > MAX_ENTRY:
        raise BadHeader(f"the entry of tensor {name[:80]} has {len(raw):,} bytes", name)
    try:
        entry = _entry.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHeader(f"the entry of tensor {name[:80]}: {error}", name) from error
    begin, end = entry.data_offsets
    if len(entry.shape) > MAX_DIMENSIONS:
        raise BadHeader(f"tensor {name[:80]} has {len(entry.shape)} dimensions", name)
    bits, nbytes = BITS.get(entry.dtype), end - begin
    if nbytes < 0 or (bits is not None and math.prod(entry.shape) * bits != nbytes * 8):
        told = f"tensor {name[:80]} of {entry.dtype} {list(entry.shape)} cannot have {nbytes:,} bytes"
        raise BadHeader(told, name)
    return HeaderEntry(entry.dtype, entry.shape, first + begin, nbytes)


def _check_whole(tensors: dict[str, HeaderEntry], first: int, file_bytes: int) -> None:
    """Raises BadHeader unless each byte behind the header belongs to exactly one tensor. This also finds a name that
    occurs twice, because the bytes of its first entry then belong to no tensor."""
    end = first
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != end:
            what = "overlaps another tensor" if stored.start < end else "comes after bytes of no tensor"
            raise BadHeader(f"tensor {name[:80]} {what}", name)
        end += stored.nbytes
    if end != file_bytes:
        raise BadHeader(f"it has {file_bytes:,} bytes, but its header describes {end:,}")
