"""A session in a file, for later or for another machine: its tokens, and its KV if the tokens do not determine it.

    byte 0          8         12        16             32                 n * 4096
         ┌───────────┬─────────┬─────────┬──────────────┬────────────────┬─────────────────────────────────────────────┐
         │ "DJINNSES"│ version │ length  │ checksum of  │ header:        │ pages of KV as in a window (kv_layout.py),  │
         │           │ (LE)    │ (LE)    │ the header   │ msgpack        │ or nothing                                  │
         └───────────┴─────────┴─────────┴──────────────┴────────────────┴─────────────────────────────────────────────┘

The header has the checksum of the pages. Checksums are XXH3-128: they find damage, not forgery. A user
that loads a file with KV trusts its writer; the daemon keeps that KV from all other sessions: see docs/guide/export.md.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import msgspec

from djinn_client.errors import FileDamaged, InvalidRequest
from djinn_client.protocol import Class
from djinn_client.protocol.fields.kv_layout import KvLayout

MAGIC = b"DJINNSES"
VERSION = 1
_PROLOGUE = struct.Struct("<8sII16s")
_ALIGNMENT = 4096
_MAX_HEADER = 256 << 20  # bytes: 50 million tokens
_PIECE = 16 << 20  # bytes that are read, and summed up, at once


class SavedSession(msgspec.Struct, kw_only=True, frozen=True):
    """The header. `kv` is the form of the pages, of the KV of the first `kv_tokens` tokens; None: there are none."""

    model: str
    fingerprint: str  # of the model: see ModelInfo
    priority: Class
    tokens: list[int]
    kv: KvLayout | None = None
    kv_tokens: int = 0
    kv_checksum: bytes = b""

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes(self.kv_tokens)


def is_saved_session(path: str | os.PathLike[str]) -> bool:
    """True if there is a file at this path that begins as a saved session does."""
    try:
        with _opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, FileDamaged):
        return False


def _opened(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens the file without waiting: a pipe of that name is refused. Raises OSError, FileDamaged."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileDamaged(f"{path} is no saved session: it is no regular file", path=str(path))
    return open(fd, "rb")


def checksum(data: bytes | memoryview) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(data)


def write(path: str | os.PathLike[str], session: SavedSession, pages: memoryview | None) -> None:
    """Replaces the file, whole or not at all; only its owner may read it. Raises OSError."""
    header = msgspec.msgpack.encode(session)
    with replacing(Path(path)) as file:
        file.write(_PROLOGUE.pack(MAGIC, VERSION, len(header), checksum(header)))
        file.write(header)
        if pages is not None:
            file.write(bytes(_aligned(file.tell()) - file.tell()))
            file.write(pages)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that only its owner may read. It takes the place of `path` after the block, when its bytes are on
    disk. If the block fails, the file at `path` stays. Raises OSError."""
    fd, beside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.replace(beside, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def sync_folder(folder: Path) -> None:
    """Returns when the names in the folder are on disk, also of files that were renamed. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SavedFile:
    """An open file, whose header has been read and checked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, FileDamaged, InvalidRequest for one of a later version."""
        self.path = path
        self._file = _opened(path)  # closed by close()
        try:
            self.session = self._header()
        except BaseException:
            self.close()
            raise

    def _header(self) -> SavedSession:
        prologue = self._file.read(_PROLOGUE.size)
        if len(prologue) < _PROLOGUE.size or not prologue.startswith(MAGIC):
            raise FileDamaged(f"{self.path} is no saved session: it begins otherwise", path=str(self.path))
        _, version, length, told = _PROLOGUE.unpack(prologue)
        if version != VERSION:
            raise InvalidRequest(
                f"{self.path} has version {version}, this djinn_client reads {VERSION}: update it", version=version
            )
        header = self._file.read(length) if length <= _MAX_HEADER else b""
        if len(header) < length or checksum(header) != told:
            raise self._damaged("its header")
        try:
            session = msgspec.msgpack.decode(header, type=SavedSession)
        except msgspec.DecodeError as error:
            raise self._damaged(f"its header ({error})") from error
        if session.kv is not None and not 0 < session.kv_tokens <= len(session.tokens):
            raise self._damaged(f"its header ({session.kv_tokens} of {len(session.tokens)} tokens have KV)")
        there = os.fstat(self._file.fileno()).st_size - _aligned(self._file.tell())
        if session.kv is not None and there != session.kv_bytes:  # before memory is taken for it
            raise self._damaged(f"its KV, which has {there:,} of {session.kv_bytes:,} bytes")
        return session

    def read_pages(self, into: memoryview) -> None:
        """All of the KV. `into` has `kv_bytes` bytes. Raises FileDamaged, and has then written to it."""
        import xxhash

        self._file.seek(_aligned(self._file.tell()))
        state, done = xxhash.xxh3_128(), 0
        while done < len(into):
            count = self._file.readinto(into[done : done + _PIECE])
            if not count:
                raise self._damaged(f"its KV, which now ends after {done:,} of {len(into):,} bytes")
            state.update(into[done : done + count])
            done += count
        if state.digest() != self.session.kv_checksum:
            raise self._damaged("its KV, whose checksum is wrong")

    def _damaged(self, what: str) -> FileDamaged:
        return FileDamaged(f"{self.path} is damaged, in {what}: use another copy of it", path=str(self.path))

    def close(self) -> None:
        self._file.close()


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT
