"""The objects in /dev/shm that are called as djinnd's are. Anybody may make some: only this user's regular files count.

An object is looked at as a mere place in the file system first. Opening a stranger's would wait for a pipe's other end,
or break a lease.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("djinnd.server")

SHM = Path("/dev/shm")
PREFIX = "djinnd-"


def own_objects(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Name and descriptor of each, which the caller closes. What is passed over is logged by what it is."""
    passed_over: Counter[str] = Counter()
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(FileNotFoundError):
                    why = _foreign(entry.stat(follow_symlinks=False))
                    names += [entry.name] * (not why)
                    passed_over[why] += bool(why)
    for name in sorted(names):
        try:
            fd = _open(folder / name)
        except OSError as error:
            passed_over[error.strerror or "no file"] += 1
            continue
        yield name, fd
    for why, count in passed_over.items():
        if count:
            log.info("arena_passed_over objects=%d folder=%s reason=%s", count, folder, why)


def _foreign(found: os.stat_result) -> str:
    """Why this is none of this daemon's."""
    if found.st_uid != os.geteuid():
        return "another user's"
    return "" if stat.S_ISREG(found.st_mode) else "no regular file"


def _open(path: Path) -> int:
    """Raises OSError, also for what has become something else since it was listed."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if why := _foreign(os.fstat(place)):
            raise OSError(0, why)
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)
