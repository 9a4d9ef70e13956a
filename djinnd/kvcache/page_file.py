"""The disk tier's storage: a file of slots, read and written by threads, and a file with the table of what is in them.

    <name>.table   0        4096                        mapped; a Tier keeps its records there
                   ┌────────┬───────────────────────┐
                   │ header │ table of Tier         │
                   └────────┴───────────────────────┘
    <name>.pages   0        extent                      never mapped; sparse until a slot is written
                   ┌────────┬────────┬─ … ─┬────────┐
                   │ slot 0 │ slot 1 │     │ slot n │   each page_bytes, rounded up to 4096
                   └────────┴────────┴─ … ─┴────────┘
    header         0        8       12      16          24     32            96         4096
                   ┌────────┬───────┬───────┬───────────┬──────┬─────────────┬──────────┐
                   │DJPAGES1│version│ zeros │page_bytes │slots │ fingerprint │  zeros   │   little-endian
                   └────────┴───────┴───────┴───────────┴──────┴─────────────┴──────────┘

Files with any other header belong to another model and are overwritten. The owner holds a lock (flock) on the table for
as long as it lives.

The table's blocks are reserved, so that writing a record never raises SIGBUS. The blocks of slots are not: if the disk
is full, the write fails. Nothing is synced; checksums detect pages that were torn by a loss of power.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.checksum import checksum
from djinnd.kvcache.tier import HOST_PAGE, Tier, whole_pages
from djinnd.kvcache.tuning import IN_FLIGHT, KEEP_FREE, MAX_SLOTS

MAGIC = b"DJPAGES1"
VERSION = 1

_HEADER = struct.Struct("<8sIIQQ64s")

Bytes = npt.NDArray[np.uint8]


class BadPage(Exception):
    """The slot does not hold the bytes with the expected checksum. The caller recomputes them."""


class PageFile:
    """Owns both files. Its threads run `read` and `write` in any order; the caller leaves buffer and slot alone until
    the Future is done.

    Buffers are uint8, `extent` bytes, contiguous, and begin at a multiple of 4096. Checksums cover the first
    `page_bytes` of them; the rest is written along. `table` is for one Tier of `slots`: zeros, or the records that the
    last Tier has left. `direct` is True if reads and writes bypass the page cache.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        page_bytes: int,
        slots: int,
        fingerprint: str,
        *,
        any_size: bool = False,
    ) -> None:
        """`fingerprint` identifies the weights and the layout of their KV; at most 64 bytes. The folder is made if it
        does not exist. `any_size`: existing files with another number of slots are kept, with that number.

        Raises BlockingIOError if another process has these files open, and OSError with ENOSPC if the disk has no room
        for the table.
        """
        assert len(fingerprint.encode()) <= 64, f"a fingerprint of {len(fingerprint.encode())} bytes"
        self.page_bytes = page_bytes
        self.slots = slots
        self.extent = whole_pages(page_bytes)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with ExitStack() as undo:
            self._table_fd = _open_locked(Path(folder, f"{name}.table"))
            undo.callback(os.close, self._table_fd)
            self._pages_fd, self.direct = _open_direct(Path(folder, f"{name}.pages"))
            undo.callback(os.close, self._pages_fd)
            self._fingerprint = fingerprint.encode()
            self.table = self._map(any_size)
            undo.pop_all()
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "djinn-pages")
        self._closed = False

    def _map(self, any_size: bool) -> Bytes:
        """Maps the table of the existing files, or begins new ones. The header is written last, so that it is there
        only if both files have their full size."""
        there = os.pread(self._table_fd, HOST_PAGE, 0)
        sizes = (os.fstat(self._table_fd).st_size, os.fstat(self._pages_fd).st_size)
        slots = _slots_in(there) if any_size else self.slots
        slots = slots if slots <= MAX_SLOTS else self.slots
        is_ours = (there, sizes) == (self._header(slots), self._sizes(slots))
        if is_ours:
            self.slots = slots
        header, whole = self._header(self.slots), self._sizes(self.slots)
        if not is_ours:
            for fd, size in zip((self._table_fd, self._pages_fd), whole, strict=True):
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
        os.posix_fallocate(self._table_fd, 0, whole[0])
        if not is_ours:
            os.pwrite(self._table_fd, header, 0)
        return np.frombuffer(mmap.mmap(self._table_fd, whole[0]), np.uint8, offset=len(header))

    def _header(self, slots: int) -> bytes:
        header = _HEADER.pack(MAGIC, VERSION, 0, self.page_bytes, slots, self._fingerprint)
        return header.ljust(HOST_PAGE, b"\0")

    def _sizes(self, slots: int) -> tuple[int, int]:
        """The sizes of table and pages, in bytes."""
        return HOST_PAGE + Tier.table_bytes(slots), slots * self.extent

    def write(self, slot: int, source: Bytes) -> Future[int]:
        """Writes a page; the result is its checksum. The Future raises OSError, with ENOSPC if the disk is full; the
        slot's contents are then undefined."""
        self._check(slot, source)
        return self._threads.submit(self._write, slot, source)

    def read(self, slot: int, into: Bytes, expected: int) -> Future[int]:
        """Reads the page with the checksum `expected`, which is also the result. The Future raises BadPage or OSError;
        the buffer's contents are then undefined."""
        self._check(slot, into)
        assert into.flags.writeable
        return self._threads.submit(self._read, slot, into, expected)

    def close(self) -> None:
        """Waits for reads and writes in flight, and closes the files. They stay for the next PageFile. The Tier must
        not be used any more."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown()
            os.close(self._pages_fd)
            fcntl.flock(self._table_fd, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor and may live on
            os.close(self._table_fd)

    def _check(self, slot: int, buffer: Bytes) -> None:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        assert buffer.dtype == np.uint8 and buffer.shape == (self.extent,), f"{buffer.dtype}{buffer.shape} for a slot"
        assert buffer.flags.c_contiguous and buffer.ctypes.data % HOST_PAGE == 0, "the buffer is not page-aligned"

    def _write(self, slot: int, source: Bytes) -> int:
        if free_bytes(self._pages_fd) < KEEP_FREE + self.extent:
            raise OSError(errno.ENOSPC, f"less than {KEEP_FREE >> 20} MiB of the disk are free")
        _transfer(os.pwritev, self._pages_fd, source, slot * self.extent)
        return checksum(source[: self.page_bytes])

    def _read(self, slot: int, into: Bytes, expected: int) -> int:
        read = _transfer(os.preadv, self._pages_fd, into, slot * self.extent)
        if read < self.extent:
            raise BadPage(f"slot {slot} ends after {read:,} of {self.extent:,} bytes")
        found = checksum(into[: self.page_bytes])
        if found != expected:
            raise BadPage(f"slot {slot} has the checksum {found:016x} instead of {expected:016x}")
        return found


def allocated_bytes(folder: str, name: str) -> int:
    """Bytes of the disk that the file's pages take already; 0 if there is no such file."""
    try:
        return Path(folder, f"{name}.pages").stat().st_blocks * 512
    except OSError:
        return 0


def free_bytes(place: str | int) -> int:
    """Free bytes of the file system that has this folder or open file."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def _slots_in(header: bytes) -> int:
    return int(_HEADER.unpack_from(header)[4]) if len(header) >= _HEADER.size else 0


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, buffer: Bytes, offset: int) -> int:
    """Moves the whole buffer, because one call may move less than asked. Returns the number of bytes: fewer only at the
    end of the file."""
    done = 0
    while done < buffer.nbytes:
        moved = call(fd, [buffer.data[done:]], offset + done)
        if moved == 0:
            break
        done += moved
    return done


def _open_locked(path: Path) -> int:
    """Raises BlockingIOError if another process holds the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # its owner has removed it meanwhile


def _open_direct(path: Path) -> tuple[int, bool]:
    """Opens the file with O_DIRECT if the filesystem can. Pages are read once, into memory that is a cache itself."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
