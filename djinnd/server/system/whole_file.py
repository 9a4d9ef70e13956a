"""Replaces small files of the state directory as a whole: after a crash a file has its old content or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from djinn_client.handover.saved_session import sync_folder


def replace_file(path: Path, content: bytes) -> None:
    """Writes the file; returns when the content is on disk. Only the daemon's user may read it. Raises OSError."""
    beside = path.with_suffix(".new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.replace(beside, path)
    sync_folder(path.parent)
