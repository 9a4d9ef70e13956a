"""Where socket and state are when nobody says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM_SOCKET = Path("/run/djinnd/djinnd.sock")
SYSTEM_STATE = Path("/var/lib/djinnd")


def default_socket(environ: Mapping[str, str], system: Path = SYSTEM_SOCKET) -> str:
    """The system's where this user may make it, else the user's own; "" where there is neither."""
    if _may_make(system.parent):
        return str(system)
    runtime = environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/djinnd/djinnd.sock" if runtime else ""


def default_state_dir(environ: Mapping[str, str], system: Path = SYSTEM_STATE) -> str:
    """systemd's, the system's where this user may make it, else the user's own."""
    if given := environ.get("STATE_DIRECTORY"):
        return given.split(":")[0]
    if _may_make(system):
        return str(system)
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '')}/.local/state"
    return f"{state}/djinnd"


def _may_make(folder: Path) -> bool:
    return os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK)
