"""The folder of page files. Files of models that are not loaded are kept for the next load while the disk has room."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from djinnd.kvcache.page_file import allocated_bytes, free_bytes
from djinnd.kvcache.tuning import KEPT_FILES, LEAST_FREE


class _Abandoned(NamedTuple):
    used: float  # when its pages were last written
    nbytes: int
    table: Path


def remove_abandoned(folder: str, but: str) -> list[str]:
    """Removes files that no process has open, the longest unused first, while there are more than KEPT_FILES or the
    disk is short. `but` is the name of a file that is about to be opened. Returns the names of the removed files.
    Raises OSError."""
    gone: list[str] = []
    with ExitStack() as locks:
        abandoned = sorted(_abandoned(folder, but, locks))
        nbytes = sum(each.nbytes for each in abandoned)
        for number, each in enumerate(abandoned):
            free = free_bytes(folder)
            if len(abandoned) - number <= KEPT_FILES and free >= LEAST_FREE * (free + nbytes):
                break
            for path in (each.table.with_suffix(".pages"), each.table):
                path.unlink(missing_ok=True)
            nbytes -= each.nbytes
            gone.append(each.table.stem)
    return gone


def _abandoned(folder: str, but: str, locks: ExitStack) -> Iterator[_Abandoned]:
    """Yields the files that no process has open. Each is locked until `locks` are closed, so that no process opens it
    meanwhile."""
    for table in Path(folder).glob("*.table"):
        with suppress(OSError):  # in use or removed
            fd = os.open(table, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            locks.callback(os.close, fd)
            if table.stem != but:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                used = table.with_suffix(".pages").stat().st_mtime
                yield _Abandoned(used, allocated_bytes(folder, table.stem), table)
