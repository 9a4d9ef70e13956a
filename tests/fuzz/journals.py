"""The journal's file, damaged in any way: it opens, and a session is there as it was at some moment, or not at all."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from djinnd.server.handover.socket_path import StartError
from djinnd.server.journal.changes import Change, Extended, SessionAdded
from djinnd.server.journal.file import NAME, JournalFile
from tests.fuzz.target import Target

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
NAMES = [f"{number:016x}" for number in range(6)]
VERSION_AT = range(60, 64)  # a later version is refused
_whole: list[bytes] = []


def commits() -> Iterator[list[Change]]:
    for number, name in enumerate(NAMES):
        yield [SessionAdded(name, number, "m", False, "agent", 5.0), Extended(name, 0, [number + 7] * 300)]
    for number, name in enumerate(NAMES):
        yield [Extended(name, 200, [number + 90] * 40)]


def tokens_of(number: int) -> list[list[int]]:
    return [[number + 7] * 300, [number + 7] * 200 + [number + 90] * 40]


def whole() -> list[bytes]:
    """A journal whose changes are folded, and one whose are not."""
    for is_folded in () if _whole else (True, False):
        folder = FOLDER / f"whole-{is_folded}"
        file = JournalFile(str(folder))
        for changes in commits():
            file.append(changes)
        if is_folded:
            file.leave()
        file.close()
        _whole.append((folder / NAME).read_bytes())
    return _whole


def seeds() -> Iterator[bytes]:
    yield b"\0\0\0\1\2\3\4\5"
    yield b"\1\1" + bytes(range(64))


def damaged(data: bytes) -> bytes:
    """The first byte says which journal, the second how it is cut, each three of the others what is changed where."""
    content = bytearray(whole()[data[0] % 2])
    for at in range(2, len(data) - 2, 3):
        place = int.from_bytes(data[at : at + 2], "little") * 7 % len(content)
        if place not in VERSION_AT:
            content[place] ^= data[at + 2]
    return bytes(content if data[1] < 128 else content[: len(content) * data[1] // 256])


def check(data: bytes) -> None:
    if len(data) < 2:
        return
    logging.disable(logging.CRITICAL)
    folder = FOLDER / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / NAME).write_bytes(damaged(data))
    refused, file = "", None
    try:
        file = JournalFile(str(folder))
    except StartError as error:
        refused = str(error)
    assert file is not None or " has version " in refused, refused
    if file is not None:
        for session in file.content().sessions:
            assert session.tokens.tolist() in tokens_of(NAMES.index(session.id)), session.id
        file.close()


PARSERS = ("tables.rows", "examination", "database", "file")
TARGET = Target(tuple(f"djinnd.server.journal.{name}" for name in PARSERS), seeds, check)
