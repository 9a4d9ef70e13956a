"""`kv`, and the parts of `save`, `load` and `from_kv` that the blocking and the asyncio client share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from djinn_client.arguments.folders import model_name
from djinn_client.arguments.options import build, token_ids
from djinn_client.handover import saved_session
from djinn_client.handover.kv import KV, KvWindow, exported_kv, window_with
from djinn_client.handover.saved_session import SavedFile, SavedSession
from djinn_client.protocol import Class, ImportSession, SessionExported, SessionInfo
from djinn_client.session.calls import SessionCalls
from djinn_client.transport.exchange import Delivery
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from djinn_client.transport.connection import OnProgress


class SessionImport(NamedTuple):
    """A request, and the window that goes with it."""

    request: ImportSession
    window: KvWindow | None = None

    @property
    def fds(self) -> list[int]:
        return [] if self.window is None else [self.window.fd]


def kv(session: SessionCalls, *, on_progress: OnProgress | None = None) -> Steps[KV]:
    """The KV of all tokens, in memory that is mapped into this process: see KV. The daemon computes missing KV first,
    and one copy over the bus brings it. `on_progress` is told how many bytes have come. Raises OutOfMemory, Retry."""
    answer = yield from session.export(kv=True, on_progress=on_progress)
    return exported_kv(answer.message, answer.fds)


def save(path: str | os.PathLike[str], info: SessionInfo, answer: Delivery[SessionExported]) -> None:
    """Writes what the daemon has exported. Raises OSError, ProtocolError."""
    told = answer.message
    kv = exported_kv(told, answer.fds) if told.kv is not None else None
    header = SavedSession(
        model=info.model,
        fingerprint=told.fingerprint,
        priority=info.priority,
        tokens=told.token_ids,
        kv=told.kv,
        kv_tokens=told.kv_tokens,
        kv_checksum=b"" if kv is None else saved_session.checksum(kv.memory),
    )
    saved_session.write(path, header, None if kv is None else kv.memory)


def import_of_file(
    path: str | os.PathLike[str], model: str | None, priority: Class | None, with_kv: bool | None
) -> SessionImport:
    """Reads the file, its KV into a window. Raises OSError, FileDamaged, InvalidRequest, OutOfMemory."""
    file = SavedFile(path)
    try:
        saved = file.session
        window = None
        if saved.kv is not None and with_kv is not False:
            window = KvWindow(saved.kv, saved.kv_tokens)
            file.read_pages(window.memory)
    finally:
        file.close()
    request = build(
        ImportSession,
        model=model_name(model) if model else saved.model,
        token_ids=saved.tokens,
        priority=priority or saved.priority,
        fingerprint=saved.fingerprint,
    )
    return _with(request, window)


def import_of_kv(
    model: str,
    tokens: Iterable[int],
    kv: Any,
    priority: Class | None,
    address: str | None,
    token: str | None,
    on_progress: OnProgress | None,
) -> SessionImport:
    """Raises InvalidRequest, TokenOutOfRange, OutOfMemory, and what loading raises."""
    ids = token_ids(tokens)
    window = window_with(model, ids, kv, address, token, on_progress)
    return _with(build(ImportSession, model=model_name(model), token_ids=ids, priority=priority), window)


def _with(request: ImportSession, window: KvWindow | None) -> SessionImport:
    if window is not None:
        request.kv, request.kv_tokens = window.layout, window.length
    return SessionImport(request, window)
