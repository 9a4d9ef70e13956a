"""Which sessions the daemon keeps for programs that know none, in the journal's file: see conversations.py."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import msgspec

from djinnd.server.journal_rows import CONVERSATION

TABLES = "CREATE TABLE conversation (session TEXT PRIMARY KEY, key TEXT, prompt INTEGER, checksum BLOB);"


class Conversed(msgspec.Struct, array_like=True, tag="conversed", frozen=True):
    """The session is kept under this key ("": none); the last prompt had so many tokens."""

    session: str
    key: str
    prompt: int


def read_conversations(db: sqlite3.Connection) -> dict[str, Conversed]:
    """By session. Raises DamagedRow."""
    return {row[0]: Conversed(*row) for row in CONVERSATION.read(db)}


class ConversationFold:
    """What one fold's changes say of sessions that are kept. `exists`: see EditFold."""

    def __init__(self, db: sqlite3.Connection, exists: Callable[[str], bool]) -> None:
        self._db = db
        self._exists = exists
        self._are: dict[str, Conversed] = {}
        self._closed: list[tuple[str]] = []

    def apply(self, change: Conversed) -> None:
        if self._exists(change.session):
            self._are[change.session] = change

    def closed(self, session: str) -> None:
        self._are.pop(session, None)
        self._closed.append((session,))

    @property
    def touched(self) -> set[str]:
        """Sessions that this fold has written of."""
        return set(self._are)

    def write(self) -> None:
        """In the fold's transaction."""
        self._db.executemany("DELETE FROM conversation WHERE session = ?", self._closed)
        rows = [CONVERSATION.sealed(each.session, each.key, each.prompt) for each in self._are.values()]
        self._db.executemany(CONVERSATION.insert, rows)
