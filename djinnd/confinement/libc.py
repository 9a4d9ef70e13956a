"""Functions of the C library that Python lacks, and their errors."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    """Returns what a function of `libc` has returned. Raises OSError if that stands for a failure. `what`: the call,
    for the error."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
