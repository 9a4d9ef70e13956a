"""Memory that clients hand over: memfds that an engine will map.

The content is not read here. The kernel guarantees, by seals and sizes, that all of the memory exists and stays,
whatever the client does. This module checks that before an engine maps it.
"""

from __future__ import annotations

import fcntl
import os

from djinn_client.errors import InvalidRequest
from djinn_client.transport.shm import FUTURE_WRITE, IMAGE_SEALS, SEALS


def expect_memfd(fd: int) -> int:
    """Returns the memfd's seals. Raises InvalidRequest if it is no memfd: reading from it could block for ever."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("the descriptor is no memfd: hand memory over in a memfd") from error


def open_window(fd: int, nbytes: int, what: str, *, for_good: bool) -> int:
    """Opens a client's memfd of `nbytes` bytes for reading, after checking its seals and size. The client's descriptor
    stays the caller's. `what` names the content, for errors. `for_good`: no process may write to it any more; otherwise
    a process that has it mapped may. Raises InvalidRequest."""
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
            f"the window of {what} has {stat.st_size:,} bytes; {nbytes:,} were announced",
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
