"""Windows: memory that passes between processes as a file descriptor."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

from djinn_client.errors import OutOfMemory, ProtocolError
from djinn_client.transport.host_memory import available

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
IMAGE_SEALS = SEALS | fcntl.F_SEAL_WRITE  # of memory that a client hands over for good
FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE: only present mappings may write, and no process may punch holes
LARGE = 64 << 20  # bytes: for smaller objects the free memory of the host is not checked

Runner = Callable[..., Any]  # runs a function with its arguments, now or later


def new_window(name: str, nbytes: int, *, is_reserved: bool = True) -> int:
    """The descriptor of a new memfd of `nbytes` bytes, all reserved, sealed against shrinking and growing. Raises
    OSError if the host has no memory for it. Without `is_reserved` all of it must be written by os.pwrite, which raises
    that, before it is mapped: a mapping of memory that the host does not have kills its process."""
    if nbytes >= LARGE and (left := available()) is not None and nbytes > left:
        raise OSError(errno.ENOMEM, f"{left:,} bytes of the host's memory are available")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if is_reserved:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal_for_writers(fd: int) -> None:
    """From now on only present mappings of the memfd may write to it, and no process may punch holes into it. So
    readers find all of its memory there, whatever its owner does."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FUTURE_WRITE)


def map_writable(fd: int, nbytes: int) -> memoryview:
    """Maps the first `nbytes` of a sealed memfd, shared and writable, as `map_window` does otherwise."""
    return _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)


def map_window(fd: int, nbytes: int, unmapped_by: Runner | None = None) -> memoryview:
    """Maps the first `nbytes` of a sealed memfd, private and writable: changes stay in this process.

    The descriptor remains the caller's and may be closed at once; the mapping lives as long as the view that is
    returned, or any view of it. (Python's own mmap keeps a duplicate of the descriptor for as long: a program that
    holds a thousand results would run out of them.) The last view unmaps the memory, or has it unmapped by
    `unmapped_by`: for 268 MB the kernel takes some 30 ms.

    Raises ProtocolError where the descriptor is not a memfd of that size that is sealed against shrinking: reading
    past the end of an object that its other holder has truncated would kill this process with SIGBUS.
    """
    return _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, unmapped_by)


def map_read_only(fd: int, nbytes: int) -> memoryview:
    """Maps the first `nbytes` of a sealed memfd, shared, as `map_window` does otherwise. The view says that it is
    writable, as torch and others want it; a process that writes to it dies. (A private mapping would be copied page by
    page when it is pinned. Some kernels refuse a shared mapping of a descriptor that is open for writing, once writing
    is sealed.)"""
    return _map(fd, nbytes, mmap.PROT_READ, mmap.MAP_SHARED)


def _map(fd: int, nbytes: int, access: int, flags: int, unmapped_by: Runner | None = None) -> memoryview:
    _expect_window(fd, nbytes)
    libc = _libc()
    address = libc.mmap(None, nbytes, access, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OutOfMemory(f"cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}", bytes=nbytes)
    window = (ctypes.c_char * nbytes).from_address(address)
    unmap = libc.munmap if unmapped_by is None else functools.partial(unmapped_by, libc.munmap)
    weakref.finalize(window, unmap, address, nbytes).atexit = False  # other finalizers may still read it
    return memoryview(window)


def _expect_window(fd: int, nbytes: int) -> None:
    """Raises ProtocolError unless the descriptor is a memfd of that size, sealed against shrinking and growing."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a descriptor that cannot be sealed was passed as a window: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise ProtocolError(f"a window is not sealed against shrinking and growing (its seals are {seals:#x})")
    if (size := os.fstat(fd).st_size) < nbytes:
        raise ProtocolError(f"a window has {size:,} bytes, {nbytes:,} were announced")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
