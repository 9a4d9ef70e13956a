"""Messages about shared memory: the engine says how much it needs, the server creates it, and the engine fills it."""

from __future__ import annotations

from typing import Any, Literal

from djinnd.messages.directions import FromEngine, ToEngine

Holding = Literal["weights", "pages"]

# --- server to engine -----------------------------------------------------------------------------------------------


class ArenaReady(ToEngine, tag="arena_ready"):
    """Reply to NeedArena: the memory exists.

    `complete`: an earlier engine or a client filled it with the same fingerprint, so nothing is read from disk. A model
    that a client shares has no name but a descriptor, `fd`, which the receiver owns.
    """

    request: int
    name: str
    offset: int  # bytes of header before the first block
    complete: bool
    fd: int = -1
    identity: str = ""  # of the complete weights: see ArenaFilled


class ArenaRefused(ToEngine, tag="arena_refused"):
    request: int
    message: str
    data: dict[str, Any] = {}
    code: str = "out_of_memory"  # of djinn_client.errors


# --- engine to server -----------------------------------------------------------------------------------------------


class NeedArena(FromEngine, tag="need_arena"):
    """Asks for an arena that holds the model's weights, or pages of its sessions."""

    request: int
    model: str
    nbytes: int
    # weights: of the checkpoint's files, before they are read, and of the layout; pages: of the weights' bytes
    fingerprint: str
    holds: Holding = "weights"


class ArenaFilled(FromEngine, tag="arena_filled"):
    """One-way: all blocks are in the arena. The server marks it complete and stores `identity` with it."""

    model: str
    identity: str = ""  # hash of all bytes of the model that were read


class HostReleased(FromEngine, tag="host_released"):
    """One-way: no block of the model needs the arena any more, and the engine has unmapped it. The server removes the
    shared memory object; a later engine gets an empty one."""

    model: str
