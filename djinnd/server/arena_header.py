"""How an object of the arena begins: whose it is, what it holds, and whether it is whole.

    byte 0       8     16            24      28    32            40         48          112     128     2048        4032
         ┌────────┬─────┬─────────────┬───────┬─────┬─────────────┬──────────┬───────────┬───────┬───────┬───────────┬──
         │DJARENA1│ pid │ start ticks │version│state│payload bytes│generation│fingerprint│ holds │ model │ state dir │ …
         └────────┴─────┴─────────────┴───────┴─────┴─────────────┴──────────┴───────────┴───────┴───────┴───────────┴──
    and up to byte 4096, where the payload begins, the identity.

Numbers are little-endian, texts UTF-8 and filled up with zeros. pid and start ticks (field 22 of /proc/<pid>/stat)
name the owner; the pid in an object's name is its creator's.
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


class State(IntEnum):
    FILLING = 1
    COMPLETE = 2
    ASLEEP = 3  # complete, of a model that no engine had when its daemon was last heard of


class Header(NamedTuple):
    pid: int
    start_ticks: int
    version: int
    state: State
    payload: int  # bytes
    generation: int  # how many engines have been given this object
    fingerprint: str  # sha256 of what the payload follows from, in hex
    holds: Holding
    model: str
    state_dir: str  # of the daemon
    identity: str = ""  # of weights that are complete: sha256 of all that was read, in hex

    @property
    def is_whole(self) -> bool:
        return self.state is not State.FILLING

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, *self[:6], *(text.encode(errors="replace") for text in self[6:]))

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises ValueError where the bytes are no header of this version."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise ValueError("no arena header")
        _, pid, ticks, version, state, payload, generation, *texts = _HEADER.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"arena version {version}, this daemon knows {VERSION}")
        decoded = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        fingerprint, holds, model, state_dir, identity = decoded
        if holds not in get_args(Holding):
            raise ValueError(f"an arena object that holds {holds!r}")
        told = (fingerprint, holds, model, state_dir, identity)
        return cls(pid, ticks, version, State(state), payload, generation, *told)


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat: with the pid it names a process for good."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])
