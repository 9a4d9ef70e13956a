"""Processes by a descriptor, pidfd_open(2): it becomes readable when the process has ended, and never means another."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress


def open_pidfd(pid: int) -> int:
    """The caller's. Raises OSError, also where this Python or this kernel has none."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this Python was built without os.pidfd_open")
    return os.pidfd_open(pid)


async def end_of(pidfd: int) -> None:
    """Returns when the process has ended, and has been reaped where it is this process's child. For one caller at a
    time."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pidfd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pidfd)
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
