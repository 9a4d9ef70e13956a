"""Finds the undamaged sessions of a journal that has damaged rows.

A session is damaged if its own row, one of its edits or breakpoints, or a change of it is damaged or missing. Its
tokens or edits might then differ from those that its client received, so it is not used. All other sessions are.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from djinnd.server.journal.changes import Change, SessionAdded
from djinnd.server.journal.clock import ClockMark
from djinnd.server.journal.tables.rows import CHANGE, MARK, PARTS, PREFIX, RECORD, SESSION, DamagedRow, Row

_decoder = msgspec.msgpack.Decoder(list[Change])


@dataclass(slots=True)
class Examined:
    """The result of an examination."""

    damaged: dict[str, str] = field(default_factory=dict)  # by session: the damaged part
    losses: list[str] = field(default_factory=list)  # rows that cannot be read
    mark: ClockMark | None = None
    folded: int | None = None  # number of the last change that is folded into the tables
    sessions: set[str] = field(default_factory=set)  # in the tables

    @property
    def is_sound(self) -> bool:
        return not (self.damaged or self.losses)

    def is_whole(self, session: str) -> bool:
        """True if the session is in the tables and undamaged."""
        return session in self.sessions and session not in self.damaged

    def keeps(self, change: Change) -> bool:
        return session_of(change) not in self.damaged


def session_of(change: Change) -> str | None:
    """The session that a change concerns; None for a change of a public prefix or a record."""
    return getattr(change, "session", None)


def examine(db: sqlite3.Connection) -> Examined:
    """Reads the whole database, and stores no values."""
    found = Examined()
    _examine_mark(db, found)
    _examine_tables(db, found)
    _examine_changes(db, found)
    return found


def changes_in(row: Row) -> list[Change]:
    """Decodes the changes of a row of `change`. Raises msgspec.DecodeError."""
    return _decoder.decode(row[2])


def _examine_mark(db: sqlite3.Connection, found: Examined) -> None:
    for row in MARK.scan(db):
        if isinstance(row, DamagedRow):
            found.losses.append(str(row.args[0]))
        else:
            _, found.folded, at, wall = row
            found.mark = ClockMark(at, wall)


def _examine_tables(db: sqlite3.Connection, found: Examined) -> None:
    told: dict[str, int] = {}
    counted: Counter[str] = Counter()
    for table in (SESSION, *PARTS, PREFIX, RECORD):
        for row in table.scan(db):
            if isinstance(row, DamagedRow):
                found.losses.append(str(row.args[0]))
            elif table is SESSION:
                told[row[0]] = row[-1]
            elif table in PARTS:
                counted[row[0]] += 1
    found.sessions = set(told)
    for session, parts in told.items():
        if counted[session] != parts:
            found.damaged[session] = f"{counted[session]} of {parts} rows of edits and breakpoints are there"
    for session in counted.keys() - told.keys():
        found.damaged[session] = "its row is damaged"


def _examine_changes(db: sqlite3.Connection, found: Examined) -> None:
    """Examines the changes. After a missing change, later changes of a session are useless, unless it was opened
    later."""
    opened = None if found.is_sound or found.mark else set[str]()  # since the last gap; None: no gap
    expected = None if found.folded is None else found.folded + 1
    for row in CHANGE.scan(db):
        if isinstance(row, DamagedRow):
            found.losses.append(str(row.args[0]))
            found.damaged.update(dict.fromkeys(_guessed(row), "a change to it is damaged"))
            opened, expected = set(), None
            continue
        if expected is not None and row[0] != expected:
            found.losses.append(f"changes {expected} to {row[0] - 1}")
            opened = set()
        expected = row[0] + 1
        if opened is not None:
            _suspect(changes_in(row), opened, found)


def _suspect(changes: list[Change], opened: set[str], found: Examined) -> None:
    """Marks sessions as damaged that have changes behind a gap, unless they were opened behind it (`opened`,
    updated)."""
    for change in changes:
        session = session_of(change)
        if isinstance(change, SessionAdded):
            opened.add(change.session)
        elif session is not None and session not in opened:
            found.damaged.setdefault(session, "a change before its last one is lost")


def _guessed(row: DamagedRow) -> Iterator[str]:
    """Yields the sessions that a damaged change names, as far as it can be decoded."""
    try:
        for change in changes_in(row.args[1:]):
            if (session := session_of(change)) is not None:
                yield session
    except (msgspec.DecodeError, IndexError, TypeError, ValueError):
        return
