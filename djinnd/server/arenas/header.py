"""The header of an object of the arena: its owner, its content, and its state.

    byte 0       8     16            24      28    32            40         48          112     128     2048        4032
         ┌────────┬─────┬─────────────┬───────┬─────┬─────────────┬──────────┬───────────┬───────┬───────┬───────────┬──
         │DJARENA1│ pid │ start ticks │version│state│payload bytes│generation│fingerprint│ holds │ model │ state dir │ …
         └────────┴─────┴─────────────┴───────┴─────┴─────────────┴──────────┴───────────┴───────┴───────┴───────────┴──

The last field, up to byte 4096, is the identity. The payload begins at byte 4096.

Numbers are little-endian. Texts are UTF-8, padded with zeros. pid and start ticks (field 22 of /proc/<pid>/stat) name
the owner; the pid in an object's name is its creator's.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, get_args

from djinnd.messages import Holding

MAGIC = b"DJARENA1"
VERSION = 4
_HEADER = struct.Struct("<8sQQIIQQ64s16s1920s1984s64s")
HEADER_BYTES = _HEADER.size


class FillState(IntEnum):
    """How far an object's payload is filled."""

    FILLING = 1
    COMPLETE = 2
    ASLEEP = 3  # complete; no engine had the model when its daemon last wrote the header


class Header(NamedTuple):
    """The fields of a header."""

    pid: int
    start_ticks: int
    version: int
    state: FillState
    payload: int  # bytes
    generation: int  # number of times that the object was granted
    fingerprint: str  # sha256, in hex, of all that decides the payload: see Checkpoint.fingerprint
    holds: Holding
    model: str
    state_dir: str  # the daemon's
    identity: str = ""  # of complete weights: sha256, in hex, of all bytes read

    @property
    def is_whole(self) -> bool:
        return self.state is not FillState.FILLING

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, *self[:6], *(text.encode(errors="replace") for text in self[6:]))

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Decodes a header. Raises ValueError if the bytes are no header of this version."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise ValueError("no arena header")
        _, pid, ticks, version, state, payload, generation, *texts = _HEADER.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"arena version {version}, this daemon knows {VERSION}")
        decoded = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        header = cls(pid, ticks, version, FillState(state), payload, generation, *decoded)
        if header.holds not in get_args(Holding):
            raise ValueError(f"an arena object that holds {header.holds!r}")
        return header


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks: field 22 of /proc/<pid>/stat. With the pid it names a process
    uniquely."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])
