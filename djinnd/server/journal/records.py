"""Records in the journal's file: see records.py. A record belongs to no session, and stays when its session is
closed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from djinnd.server.journal.rows import RECORD

TABLES = """
    CREATE TABLE record (
        user INTEGER, id TEXT, model TEXT, session TEXT, created REAL, tokens BLOB, body BLOB, checksum BLOB,
        PRIMARY KEY (user, id)
    );
"""


class Recorded(msgspec.Struct, array_like=True, tag="recorded", frozen=True):
    """A user's record; it replaces one of the same name. `origin`: the session from which it was made. `tokens`: 32
    bits each. `created`: seconds since 1970."""

    user: int
    record: str
    model: str
    origin: str
    created: float
    tokens: bytes
    body: bytes


class Unrecorded(msgspec.Struct, array_like=True, tag="unrecorded", frozen=True):
    """The user's record of this name was dropped."""

    user: int
    record: str


def read_records(db: sqlite3.Connection) -> Iterator[Recorded]:
    """Reads all records, the oldest first. Raises DamagedRow."""
    return (Recorded(*row) for row in RECORD.read(db, "ORDER BY created"))


class RecordFold:
    """Applies one fold's changes to records."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._are: dict[tuple[int, str], Recorded | None] = {}

    def apply(self, change: Recorded | Unrecorded) -> None:
        self._are[change.user, change.record] = change if isinstance(change, Recorded) else None

    def write(self) -> None:
        """Writes the changed rows, in the fold's transaction."""
        gone = [name for name, record in self._are.items() if record is None]
        rows = [RECORD.sealed(*msgspec.structs.astuple(record)) for record in self._are.values() if record is not None]
        self._db.executemany("DELETE FROM record WHERE user = ? AND id = ?", gone)
        self._db.executemany(RECORD.insert, rows)
