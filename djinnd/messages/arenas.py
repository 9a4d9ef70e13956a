"""Shared memory: the server creates it, the engine says how much, and fills it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Holding = Literal["weights", "pages"]

# --- server to engine -----------------------------------------------------------------------------------------------


class ArenaReady(msgspec.Struct, tag="arena_ready"):
    """`complete`: an earlier engine, or a client, filled it with the same fingerprint; nothing need be read from disk.

    Of a model that a client shares there is no name but a descriptor, which is the receiver's: `fd` is its number."""

    request: int
    name: str
    offset: int  # bytes of header before the first block
    complete: bool
    fd: int = -1
    identity: str = ""  # of the weights that are complete: see ArenaFilled


class ArenaRefused(msgspec.Struct, tag="arena_refused"):
    request: int
    message: str
    data: dict[str, Any] = {}
    code: str = "out_of_memory"  # of djinn_client.errors


# --- engine to server -----------------------------------------------------------------------------------------------


class NeedArena(msgspec.Struct, tag="need_arena"):
    """`holds`: the model's weights, or pages of its sessions."""

    request: int
    model: str
    nbytes: int
    fingerprint: str  # of the checkpoint's files, before they are read, and the layout; of pages: of the weights' bytes
    holds: Holding = "weights"


class ArenaFilled(msgspec.Struct, tag="arena_filled"):
    """One-way: all blocks are in the arena; the server marks it complete, and keeps with it what they are."""

    model: str
    identity: str = ""  # of the model, by all bytes that were read


class HostReleased(msgspec.Struct, tag="host_released"):
    """One-way: no block of the model needs the arena any more, and it is not mapped. The server removes the object; a
    later engine gets an empty one."""

    model: str
