"""Messages about the LoRA adapters of a loaded model. An adapter is known by its identity, a hash of its files."""

from __future__ import annotations

from djinnd.messages.directions import CallAnswer, EngineCall, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class LoadAdapter(EngineCall["AdapterLoaded"], tag="load_adapter"):
    """Reads an adapter to host memory. Its open files travel with the frame."""

    model: str
    folder: str  # used in messages, and never opened
    files: list[str]  # names of the open files
    most_bytes: int  # that its matrices may have
    fds: list[int] = []  # descriptors of `files`, in their order; the receiver owns them


class DropAdapter(ToEngine, tag="drop_adapter"):
    """One-way: no open session uses the adapter, so the engine forgets it."""

    model: str
    identity: bytes


# --- engine to server -----------------------------------------------------------------------------------------------


class AdapterLoaded(CallAnswer, tag="adapter_loaded"):
    identity: bytes
    rank: int  # the largest
    modules: int
    nbytes: int  # on the host, and again on the device while it is there
