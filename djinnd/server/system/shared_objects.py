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
from pathlib import Path

log = logging.getLogger("djinnd.server")

SHM = Path("/dev/shm")
PREFIX = "djinnd-"


def own_objects(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Yields name and descriptor of each object; the caller closes it. Logs how many others were skipped, and why."""
    passed_over: Counter[str] = Counter()
    for name in sorted(os.listdir(folder)):
        if not name.startswith(prefix):
            continue
        try:
            fd = _open(folder / name)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            passed_over[str(error.strerror)] += 1
            continue
        yield name, fd
    for why, count in passed_over.items():
        log.info("arena_passed_over objects=%d folder=%s reason=%s", count, folder, why)


def _open(path: Path) -> int:
    """Opens an object. Raises OSError, also if the object does not belong to this daemon's user."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid():
            raise OSError(0, "another user's")
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "no regular file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)
