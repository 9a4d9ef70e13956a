"""The base of the folds of one table of sessions' data: edits, breakpoints, conversations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")


class SessionFold(Generic[T]):
    """Stores a T for each session that a change concerns, until it is written. `exists` tells if a session exists at
    the time of the change: changes after a session's close are ignored."""

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
        """Sessions with data that this fold changes."""
        return set(self._are)

    def _forget_closed(self) -> None:
        """Deletes the rows of closed sessions, in the fold's transaction."""
        for table in self._tables:
            self._db.executemany(f"DELETE FROM {table} WHERE session = ?", self._closed)
