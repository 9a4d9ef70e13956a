"""Clients of a daemon with another user's identity, which needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def open_to_all(folder: Path, address: str) -> None:
    """Opens the folder and the socket of its daemon to all users."""
    folder.chmod(0o755)
    os.chmod(address, 0o666)


@contextmanager
def as_user(user: int = NOBODY) -> Iterator[None]:
    """Connections made in this context are that user's: the kernel tells the daemon the effective user."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
