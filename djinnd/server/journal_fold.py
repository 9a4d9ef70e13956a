"""What one fold's changes make of the sessions that they are about."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")


class SessionFold(Generic[T]):
    """Keeps a T for each session that a change is about, until it is written. `exists` says whether there is such a
    session, as of the change: what comes after a session's close has no effect."""

    _tables: ClassVar[tuple[str, ...]]  # with rows of sessions

    def __init__(self, db: sqlite3.Connection, exists: Callable[[str], bool]) -> None:
        self._db = db
        self._exists = exists
        self._are: dict[str, T] = {}
        self._closed: list[tuple[str]] = []

    def closed(self, session: str) -> None:
        self._are.pop(session, None)
        self._closed.append((session,))

    @property
    def touched(self) -> set[str]:
        """Sessions that this fold writes of."""
        return set(self._are)

    def _forget_closed(self) -> None:
        """In the fold's transaction."""
        for table in self._tables:
            self._db.executemany(f"DELETE FROM {table} WHERE session = ?", self._closed)
