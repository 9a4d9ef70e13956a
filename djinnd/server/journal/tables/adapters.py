"""The adapters of sessions in the journal's file."""

from __future__ import annotations

import sqlite3

import msgspec

from djinnd.server.journal.tables.rows import ADAPTER

TABLES = "CREATE TABLE adapter (session TEXT PRIMARY KEY, name TEXT, identity BLOB, checksum BLOB);"


class AdapterChosen(msgspec.Struct, array_like=True, tag="adapted", frozen=True):
    """The session was opened with this adapter, which it keeps."""

    session: str
    name: str
    identity: bytes


def read_adapters(db: sqlite3.Connection) -> dict[str, AdapterChosen]:
    """Reads the adapters of all sessions that have one, by session. Raises DamagedRow."""
    return {row[0]: AdapterChosen(*row) for row in ADAPTER.read(db)}
