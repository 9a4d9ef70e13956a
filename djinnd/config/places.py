"""Default places of the socket and of the state folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM_SOCKET = Path("/run/djinnd/djinnd.sock")
SYSTEM_STATE = Path("/var/lib/djinnd")


def default_socket(environ: Mapping[str, str], system: Path = SYSTEM_SOCKET) -> str:
    """The system's socket if this user may make it, otherwise one in $XDG_RUNTIME_DIR; "" if that is not set."""
    if _may_make(system.parent):
        return str(system)
    runtime = environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/djinnd/djinnd.sock" if runtime else ""


def default_state_dir(environ: Mapping[str, str], system: Path = SYSTEM_STATE) -> str:
    """The first of $STATE_DIRECTORY, which systemd sets; the system's folder, if this user may make it; and a folder in
    the user's home."""
    if given := environ.get("STATE_DIRECTORY"):
        return given.split(":")[0]
    if _may_make(system):
        return str(system)
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '')}/.local/state"
    return f"{state}/djinnd"


def _may_make(folder: Path) -> bool:
    return os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK)
