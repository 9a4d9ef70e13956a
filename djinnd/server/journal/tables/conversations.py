"""The sessions that the daemon keeps for programs without sessions, in the journal's file: see
server/sessions/conversations.py."""

from __future__ import annotations

import sqlite3

import msgspec

from djinnd.server.journal.tables.rows import CONVERSATION

TABLES = "CREATE TABLE conversation (session TEXT PRIMARY KEY, key TEXT, prompt INTEGER, checksum BLOB);"


class ConversationKept(msgspec.Struct, array_like=True, tag="conversed", frozen=True):
    """The session is kept under this key ("": none), with the number of tokens of its last prompt."""

    session: str
    key: str
    prompt: int


def read_conversations(db: sqlite3.Connection) -> dict[str, ConversationKept]:
    """Reads all kept sessions, by their ids. Raises DamagedRow."""
    return {row[0]: ConversationKept(*row) for row in CONVERSATION.read(db)}
