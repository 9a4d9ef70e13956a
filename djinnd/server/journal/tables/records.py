"""Records in the journal's file: see server/sessions/records.py. A record belongs to no session, and stays when its
session is closed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from djinnd.server.journal.tables.rows import RECORD

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
