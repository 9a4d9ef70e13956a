"""Clients of a daemon that are another user's, which only root can play."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def open_to_all(folder: Path, address: str) -> None:
    """The socket of a daemon that has this folder."""
    folder.chmod(0o755)
    os.chmod(address, 0o666)


@contextmanager
def as_user(user: int = NOBODY) -> Iterator[None]:
    """Connections that are made in this context are that user's: the kernel tells the daemon the effective one."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
