"""Compares the server's tables with each other, with the engine's report and with the kernel's."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from djinnd.messages import Report
from djinnd.server.arenas.arena import Arena
from djinnd.server.loading.models import ModelTable
from djinnd.server.loading.sharing import ShareTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.clients import ClientTable

_FDS = Path("/proc/self/fd")


def audit_tables(clients: ClientTable, sessions: SessionTable, models: ModelTable, arena: Arena) -> Iterator[str]:
    """Yields a line for each contradiction between the server's tables."""
    connected = set(clients)
    for session in sessions:
        if not session.attached <= connected:
            yield f"session {session.id} is attached to a connection that is gone"
        if (session.grace is None) == (not session.attached and session.kept is None):
            yield f"session {session.id} has {len(session.attached)} connections and a wrong grace timer"
        if session.call is not None and session.call.whole not in session.call.client.calls.values():
            yield f"session {session.id} works for a request that has ended"
    by_user = Counter(client.user for client in connected)
    if clients.counted != by_user:
        yield f"connections by user are {dict(by_user)}, and {clients.counted} are counted"
    under_way = sum(len(client.calls) for client in connected)
    if clients.unfinished < under_way:
        yield f"{under_way} requests are under way, {clients.unfinished} are counted"
    idle = {model.name for model in models if model.engine is None and model.changing is None}
    kept = {model.name for model in models if model.state in ("failed", "asleep") and arena.is_complete(model.name)}
    of_nobody = arena.models & idle - kept  # complete weights stay for the next load, also after a death or in sleep
    yield from (f"the arena holds blocks of {name}, which is not loaded" for name in sorted(of_nobody))
    yield from arena.findings()


def audit_engine(expected: Iterable[SessionRecord], report: Report) -> Iterator[str]:
    """Compares the sessions of the server with the engine's report. `expected`: the sessions of ready models when the
    report was requested."""
    here, there = {session.id for session in expected}, {use.session for use in report.sessions}
    yield from (f"session {name} is not known to the engine" for name in sorted(here - there))
    yield from (f"the engine has session {name}, which is closed" for name in sorted(there - here))
    yield from report.findings


def audit_descriptors(
    clients: ClientTable, sharing: ShareTable, address: str, files: Collection[int] = ()
) -> Iterator[str]:
    """Checks the open descriptors of this process. Each accepted connection must be a client's. Each memfd must be
    shared weights, wait to be sent, or belong to a request under way. `files` are those of checkpoints, some of which
    may be memfds."""
    known = {client.fd for client in clients}
    held = {fd for fd in map(int, os.listdir(_FDS)) if _is_accepted(fd, address)}
    yield from (f"descriptor {fd} is a connection of no client" for fd in sorted(held - known))
    known_files = {*sharing.windows, *files}
    memfds = sum(_target(fd).startswith("/memfd:") for fd in map(int, os.listdir(_FDS)) if fd not in known_files)
    yield from (f"the weights in descriptor {fd} are gone" for fd in sorted(sharing.windows) if not _target(fd))
    waiting = sum(client.queued_fds for client in clients) + clients.windows
    if memfds > waiting + clients.unfinished:
        yield f"{memfds} memfds are open, {waiting} wait to be sent"


def _is_accepted(fd: int, address: str) -> bool:
    if not _target(fd).startswith("socket:"):
        return False
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family != socket.AF_UNIX or sock.getsockname() != address:
            return False
        return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _target(fd: int) -> str:
    try:
        return os.readlink(_FDS / str(fd))
    except FileNotFoundError:
        return ""  # the descriptor of the listing itself
