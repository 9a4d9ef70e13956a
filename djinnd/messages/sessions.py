"""Messages about sessions: open, fork, close, truncate and edit them, and hand their KV over to a client or back."""

from __future__ import annotations

from djinn_client.protocol import Class
from djinnd.core.edits import FOREVER, Edit
from djinnd.messages.directions import FromEngine, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class Open(ToEngine, tag="open"):
    """One-way. `tokens`: of a session that an earlier engine had. Its KV is computed again when it next runs; a
    `paused` one runs only after Resume."""

    session: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int] = []
    paused: bool = False
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER  # see Session
    adapter: bytes = b""  # identity; the engine needs the adapter when the session runs


class Fork(ToEngine, tag="fork"):
    """One-way: opens a session with the tokens and the KV of `parent`, which is idle."""

    session: str
    parent: str
    priority: Class


class Close(ToEngine, tag="close"):
    """One-way. A request that still runs ends with Finished(cancelled)."""

    session: str


class Truncate(ToEngine, tag="truncate"):
    """One-way; the session is idle."""

    session: str
    length: int


class AddEdit(ToEngine, tag="add_edit"):
    """One-way; the session is idle."""

    session: str
    edit: Edit


class EndEdits(ToEngine, tag="end_edits"):
    """One-way; the session is idle. From position `at` on, these edits change nothing."""

    session: str
    edits: list[int]
    at: int


class ExportKv(ToEngine, tag="export_kv"):
    """Answered by KvExported, or by Failed. The session is idle. Any KV that it lacks is computed first; CancelRun
    interrupts that."""

    request: int
    session: str


class ImportKv(ToEngine, tag="import_kv"):
    """Opens a session with these tokens. The KV of the first `kv_tokens` of them is in the client's window, `fd`, which
    the receiver owns.

    Answered by Finished when the KV is on the device. Answered by Failed when it is not: the session is open then and
    has no KV. `salt` keeps its pages apart from pages that the tenant's other sessions have for the same tokens.
    """

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


class KvExported(FromEngine, tag="kv_exported"):
    """Final reply of ExportKv: the KV of all of the session's tokens is in the sealed memfd that comes with the frame,
    in the layout of the pool's pages."""

    request: int
    tokens: int
