"""Finds the objects in /dev/shm that have the names of djinnd's. Any user may create such names, so only regular files
of this user count.

An object is opened with O_PATH first. Opening a stranger's object for reading could wait for the other end of a pipe,
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
    """Yields name and descriptor of each object; the caller closes it. Logs how many others were skipped, and why."""
    passed_over: Counter[str] = Counter()
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(FileNotFoundError):
                    why = _why_foreign(entry.stat(follow_symlinks=False))
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


def _why_foreign(found: os.stat_result) -> str:
    """Why the object does not belong to this daemon's user; empty if it does."""
    if found.st_uid != os.geteuid():
        return "another user's"
    return "" if stat.S_ISREG(found.st_mode) else "no regular file"


def _open(path: Path) -> int:
    """Opens an object. Raises OSError, also if the name now stands for another kind of file."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if why := _why_foreign(os.fstat(place)):
            raise OSError(0, why)
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)
