"""Memory that clients hand over: memfds of theirs, which an engine will map.

Nothing of them is read here. What must hold before an engine reads one is the kernel's word: all of its memory is
there, and stays there whatever the client does.
"""

from __future__ import annotations

import fcntl
import os

from djinn_client.errors import InvalidRequest
from djinn_client.shm import FUTURE_WRITE, IMAGE_SEALS, SEALS


def expect_memfd(fd: int) -> int:
    """Its seals. Raises InvalidRequest for what is none: reading from it could wait for ever."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("what is handed over lies in a memfd, and this descriptor is none") from error


def open_window(fd: int, nbytes: int, what: str, *, for_good: bool) -> int:
    """A descriptor of this daemon's own, for reading, of a client's memfd with so many bytes; the client's stays the
    caller's. `what` lies in it. `for_good`: nobody may write to it any more; else who has it mapped may.

    Raises InvalidRequest."""
    seals = expect_memfd(fd)
    if seals & SEALS != SEALS or not seals & (fcntl.F_SEAL_WRITE | (0 if for_good else FUTURE_WRITE)):
        writing, wanted = ("writing", IMAGE_SEALS) if for_good else ("(future) writing", SEALS | FUTURE_WRITE)
        raise InvalidRequest(
            f"the window of {what} must be sealed against shrinking, growing and {writing} (seals {wanted:#x}); its "
            f"seals are {seals:#x}",
            seals=seals,
        )
    stat = os.fstat(fd)
    if stat.st_size != nbytes:
        raise InvalidRequest(
            f"the window of {what} has {stat.st_size:,} bytes; what was announced has {nbytes:,}",
            bytes=stat.st_size,
            needed=nbytes,
        )
    reserved = stat.st_blocks * 512
    if reserved < nbytes:
        raise InvalidRequest(
            f"the window of {what} has memory for {reserved:,} of {nbytes:,} bytes: reserve all of it before you seal "
            "it (posix_fallocate)",
            bytes=reserved,
            needed=nbytes,
        )
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"the window of {what} cannot be opened for reading: {error}") from error
