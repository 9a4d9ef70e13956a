"""Processes by descriptor, pidfd_open(2). A pidfd becomes readable when its process has ended, and its process never
changes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress


def open_pidfd(pid: int) -> int:
    """Opens a pidfd, which the caller owns. Raises OSError, also if this Python or this kernel has no pidfds."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this Python was built without os.pidfd_open")
    return os.pidfd_open(pid)


async def end_of(pidfd: int) -> None:
    """Returns when the process has ended, and reaps it if it is this process's child. For one caller at a time."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pidfd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pidfd)
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
