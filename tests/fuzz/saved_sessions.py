"""Saved sessions: a file of any bytes is read, or refused with a typed error that names it; its pages are only given
where their checksum is right."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from djinn_client.errors import DjinnError
from djinn_client.handover import saved_session
from djinn_client.handover.saved_session import SavedFile, SavedSession, checksum
from djinn_client.protocol.fields.kv_layout import KvLayout
from tests.fuzz.messages import Choices, hostile_message
from tests.fuzz.target import Target

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
LAYOUT = KvLayout(blocks=2, kv_heads=1, head_dim=8, dtype="float32", page_size=16)


def seeds() -> Iterator[bytes]:
    """Whole files."""
    for kv in (None, LAYOUT):
        tokens = [1, 2, 3]
        pages = None if kv is None else memoryview(bytes(range(256)) * (kv.nbytes(len(tokens)) // 256 + 1))
        count = 0 if kv is None else len(tokens)
        pages = None if pages is None or kv is None else pages[: kv.nbytes(count)]
        told = b"" if pages is None else checksum(pages)
        session = SavedSession(
            model="m", fingerprint="f", priority="agent", tokens=tokens, kv=kv, kv_tokens=count, kv_checksum=told
        )
        path = FOLDER / "seed"
        saved_session.write(path, session, pages)
        yield path.read_bytes()


def with_header(header: bytes, behind: bytes) -> bytes:
    """A file whose header is what it says, so that what the header claims is looked at."""
    told = saved_session._PROLOGUE.pack(saved_session.MAGIC, saved_session.VERSION, len(header), checksum(header))
    return told + header + behind


def check(data: bytes) -> None:
    choices = Choices(data)
    length = choices.below(len(data) + 1)
    header = hostile_message(data[2:], [SavedSession, KvLayout])
    try:
        fields = msgspec.msgpack.decode(header)
        fields.pop("type", None)
        header = msgspec.msgpack.encode(fields)
    except (msgspec.DecodeError, AttributeError, UnicodeDecodeError):
        pass
    for content in (data, with_header(data[2:length], data[length:]), with_header(header, data[:64])):
        _read(content)


def _read(content: bytes) -> None:
    path = FOLDER / "file"
    path.write_bytes(content)
    refused: DjinnError | None = None
    try:
        with closing(SavedFile(path)) as file:
            if file.session.kv is not None:
                into = memoryview(bytearray(file.session.kv_bytes))
                file.read_pages(into)
                assert checksum(into) == file.session.kv_checksum
    except DjinnError as error:
        refused = error
    assert refused is None or os.fspath(path) in refused.message


TARGET = Target(("djinn_client.handover.saved_session", "djinn_client.protocol.fields.kv_layout"), seeds, check)
