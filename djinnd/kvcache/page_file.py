"""The disk tier's memory: a file of slots, read and written by threads, beside the table that says what is in them.

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

Files whose header is not exactly what it would be now hold the pages of another model, and are begun anew. The owner
holds a lock (flock) on the table for as long as it lives.

The table's blocks are reserved, so that writing a record is never a SIGBUS. The slots' are not: a full disk is an error
of the write that finds it full. Nothing is synced. What a loss of power has torn, the checksums tell.
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
from djinnd.kvcache.tier import MAX_SLOTS, Tier

MAGIC = b"DJPAGES1"
VERSION = 1
ALIGNMENT = 4096  # of addresses, offsets and sizes under O_DIRECT; enough for every disk in use
IN_FLIGHT = 8
KEEP_FREE = 64 << 20  # bytes of the disk, for others and for the journal beside it: no page is written then

_HEADER = struct.Struct("<8sIIQQ64s")

Bytes = npt.NDArray[np.uint8]


class BadPage(Exception):
    """The slot does not hold the bytes whose checksum was asked for. Whoever wanted them computes them anew."""


class PageFile:
    """Owns both files. What was asked of `read` and `write` happens in its threads, in no order; the caller leaves
    buffer and slot alone until the Future is done.

    Buffers are uint8, `extent` bytes, contiguous, and begin at a multiple of 4096. Checksums are of the first
    `page_bytes` of them; the rest travels along. `table` is for one Tier of `slots`: zeros, or what the last has left.
    `direct`: reads and writes go past the page cache.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        page_bytes: int,
        slots: int,
        fingerprint: str,
        in_flight: int = IN_FLIGHT,
        *,
        any_size: bool = False,
    ) -> None:
        """`fingerprint`: of the weights and the layout of their KV, at most 64 bytes. The folder is made if need be.
        `any_size`: files that are there and have another number of slots are kept with that.

        Raises OSError: BlockingIOError where another process has these files, ENOSPC where the table has no room."""
        assert len(fingerprint.encode()) <= 64, f"a fingerprint of {len(fingerprint.encode())} bytes"
        self.page_bytes = page_bytes
        self.slots = slots
        self.extent = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._paths = [Path(folder, f"{name}.table"), Path(folder, f"{name}.pages")]
        with ExitStack() as undo:
            self._table_fd = _open_locked(self._paths[0])
            undo.callback(os.close, self._table_fd)
            self._pages_fd, self.direct = _open_direct(self._paths[1])
            undo.callback(os.close, self._pages_fd)
            self._fingerprint = fingerprint.encode()
            self.table = self._map(any_size)
            undo.pop_all()
        self._threads = ThreadPoolExecutor(in_flight, "djinn-pages")
        self._closed = False

    def _map(self, any_size: bool) -> Bytes:
        """The table, adopted or begun anew. There is a header only while both files are whole."""
        there = os.pread(self._table_fd, ALIGNMENT, 0)
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
        return header.ljust(ALIGNMENT, b"\0")

    def _sizes(self, slots: int) -> tuple[int, int]:
        """Of table and pages."""
        return ALIGNMENT + Tier.table_bytes(slots), slots * self.extent

    def write(self, slot: int, source: Bytes) -> Future[int]:
        """The checksum of what has been written. The Future raises OSError, ENOSPC where the disk is full; the slot
        then holds anything."""
        self._check(slot, source)
        return self._threads.submit(self._write, slot, source)

    def read(self, slot: int, into: Bytes, expected: int) -> Future[None]:
        """Done when `into` holds the page whose checksum is `expected`. The Future raises BadPage, or OSError; `into`
        then holds anything."""
        self._check(slot, into)
        assert into.flags.writeable
        return self._threads.submit(self._read, slot, into, expected)

    def close(self) -> None:
        """Waits for what is in flight. The files stay, for the next to adopt; the Tier is not used any more."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown()
            os.close(self._pages_fd)
            fcntl.flock(self._table_fd, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor, and may live on
            os.close(self._table_fd)

    def remove(self) -> None:
        """Instead of `close`: leaves no files."""
        if not self._closed:
            for path in self._paths:
                path.unlink(missing_ok=True)
            self.close()

    def _check(self, slot: int, buffer: Bytes) -> None:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        assert buffer.dtype == np.uint8 and buffer.shape == (self.extent,), f"{buffer.dtype}{buffer.shape} for a slot"
        assert buffer.flags.c_contiguous and buffer.ctypes.data % ALIGNMENT == 0, "the buffer is not page-aligned"

    def _write(self, slot: int, source: Bytes) -> int:
        disk = os.fstatvfs(self._pages_fd)
        if disk.f_bavail * disk.f_frsize < KEEP_FREE + self.extent:
            raise OSError(errno.ENOSPC, f"less than {KEEP_FREE >> 20} MiB of the disk are free")
        _transfer(os.pwritev, self._pages_fd, source, slot * self.extent)
        return checksum(source[: self.page_bytes])

    def _read(self, slot: int, into: Bytes, expected: int) -> None:
        read = _transfer(os.preadv, self._pages_fd, into, slot * self.extent)
        if read < self.extent:
            raise BadPage(f"slot {slot} ends after {read:,} of {self.extent:,} bytes")
        found = checksum(into[: self.page_bytes])
        if found != expected:
            raise BadPage(f"slot {slot} has the checksum {found:016x} instead of {expected:016x}")


def allocated_bytes(folder: str, name: str) -> int:
    """Of the disk, that the pages of that file have already."""
    try:
        return Path(folder, f"{name}.pages").stat().st_blocks * 512
    except OSError:
        return 0


def _slots_in(header: bytes) -> int:
    return int(_HEADER.unpack_from(header)[4]) if len(header) >= _HEADER.size else 0


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, buffer: Bytes, offset: int) -> int:
    """Bytes moved: fewer than the buffer's at the end of the file only. The kernel may move fewer than asked."""
    done = 0
    while done < buffer.nbytes:
        moved = call(fd, [buffer.data[done:]], offset + done)
        if moved == 0:
            break
        done += moved
    return done


def _open_locked(path: Path) -> int:
    """Raises BlockingIOError where somebody else has the lock."""
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
    """Past the page cache, if the filesystem can: pages are read once, into memory that is a cache itself."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
