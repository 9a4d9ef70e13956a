"""The sessions in the journal's file, as of the last fold."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from djinn_client.protocol import Class
from djinnd.server.journal.tables.rows import SESSION, Row

TOKEN = "I"  # array type of tokens in a blob: uint32


@dataclass(slots=True)
class JournalSession:
    """A session in the journal. Times are the journal's (clock.py); `used` is the time of the last change of
    its tokens. `parts`: number of rows of its edits, breakpoints and conversation."""

    id: str
    user: int
    model: str
    shared: bool
    priority: Class
    created: float
    used: float
    tokens: array[int]
    parts: int = 0

    @property
    def row(self) -> Row:
        known = (self.id, self.user, self.model, int(self.shared), self.priority, float(self.created))
        return (*known, self.used, self.tokens.tobytes(), self.parts)


def read_sessions(db: sqlite3.Connection, where: str, values: Row = ()) -> Iterator[JournalSession]:
    """Reads sessions. SQLite has neither bools nor arrays. Raises DamagedRow."""
    for row in SESSION.read(db, where, values):
        session = JournalSession(*row)
        session.shared, session.tokens = bool(row[3]), array(TOKEN, row[7])
        yield session
