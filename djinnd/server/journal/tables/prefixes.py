"""Public prefixes in the journal's file: see server/sessions/prefixes.py."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator

import msgspec

from djinnd.server.journal.tables.rows import PREFIX, Row
from djinnd.server.journal.tables.sessions import TOKEN


class Published(msgspec.Struct, array_like=True, tag="published", frozen=True):
    """A public prefix of the model. `user` has published it. `created`: seconds since 1970."""

    prefix: str
    model: str
    user: int
    created: float
    tokens: list[int]

    @property
    def row(self) -> Row:
        tokens = array(TOKEN, self.tokens).tobytes()
        return self.prefix, self.model, self.user, float(self.created), tokens


class Withdrawn(msgspec.Struct, array_like=True, tag="withdrawn", frozen=True):
    """A public prefix was withdrawn."""

    prefix: str


def read_prefixes(db: sqlite3.Connection) -> Iterator[Published]:
    """Reads all public prefixes, the oldest first. Raises DamagedRow."""
    for prefix, model, user, created, tokens in PREFIX.read(db, "ORDER BY created"):
        yield Published(prefix, model, user, created, array(TOKEN, tokens).tolist())
