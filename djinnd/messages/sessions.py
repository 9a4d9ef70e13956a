"""Sessions: how they begin and end, what changes in them between runs, and KV that leaves with a client or comes."""

from __future__ import annotations

import msgspec

from djinn_client.protocol import Class
from djinnd.core.edits import FOREVER, Edit

# --- server to engine -----------------------------------------------------------------------------------------------


class Open(msgspec.Struct, tag="open"):
    """One-way. With tokens: a session of an earlier engine, whose KV is computed anew when it next runs; `paused`: when
    it is resumed."""

    session: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int] = []
    paused: bool = False
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER  # see Session


class Fork(msgspec.Struct, tag="fork"):
    """One-way: opens a session with the tokens and the KV of `parent`, which is idle."""

    session: str
    parent: str
    priority: Class


class Close(msgspec.Struct, tag="close"):
    """One-way. A request that still runs ends with Finished(cancelled)."""

    session: str


class Truncate(msgspec.Struct, tag="truncate"):
    """One-way; the session is idle."""

    session: str
    length: int


class AddEdit(msgspec.Struct, tag="add_edit"):
    """One-way. The session is idle."""

    session: str
    edit: Edit


class EndEdits(msgspec.Struct, tag="end_edits"):
    """One-way, likewise: from position `at` on these change nothing."""

    session: str
    edits: list[int]
    at: int


class ExportKv(msgspec.Struct, tag="export_kv"):
    """The session is idle. Answered by KvExported, or by Failed. What of its KV is not there is computed first, which
    CancelRun breaks off."""

    request: int
    session: str


class ImportKv(msgspec.Struct, tag="import_kv"):
    """Opens a session with these tokens, and with the KV of the first `kv_tokens` of them in the client's window, whose
    descriptor travels with the frame and is the receiver's: `fd` is its number. Answered by Finished when it is on the
    device, or by Failed, and then the session is open and has none.

    `salt` sets its pages apart from what others of its tenant have with the same tokens."""

    request: int
    session: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int]
    kv_tokens: int
    salt: bytes
    fd: int = -1


# --- engine to server -----------------------------------------------------------------------------------------------


class KvExported(msgspec.Struct, tag="kv_exported"):
    """Final reply of ExportKv: the KV of all of the session's tokens is in the sealed memfd that comes with this frame,
    in the pages of the pool."""

    request: int
    tokens: int
