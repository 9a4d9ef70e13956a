"""The tables of the journal's file. Each row ends with a checksum of everything else in it.

SQLite notices a broken page structure, and not a flipped bit in a value: tokens would come back as other tokens. The
checksum (XXH3, 64 bits) is of the table's name and the row's values, so a row is not taken for one of another table.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from xxhash import xxh3_64_digest

Row = tuple[Any, ...]  # its values, without the checksum

_LAST = 1 << 62  # beyond every row's number
_encoder = msgspec.msgpack.Encoder()


class DamagedRow(ValueError):
    """A row whose values and checksum do not go together."""


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[str, ...]

    @cached_property
    def insert(self) -> str:
        return f"INSERT OR REPLACE INTO {self.name} VALUES ({', '.join('?' * (len(self.columns) + 1))})"

    @property
    def add_checksums(self) -> str:
        """For a table of a version that had none; needs `register`."""
        values = f"row_checksum('{self.name}', {', '.join(self.columns)})"
        return f"ALTER TABLE {self.name} ADD COLUMN checksum BLOB; UPDATE {self.name} SET checksum = {values};"

    def sealed(self, *values: Any) -> Row:
        """The values and their checksum, as `insert` takes them. Numbers have their column's type: a bool is none."""
        return (*values, _checksum(self.name, *values))

    def read(self, db: sqlite3.Connection, where: str = "", values: Row = ()) -> Iterator[Row]:
        """Raises DamagedRow."""
        for row in db.execute(f"SELECT {self._all} FROM {self.name} {where}", values):
            yield self._checked(row)

    def scan(self, db: sqlite3.Connection) -> Iterator[Row | DamagedRow]:
        """Every row that can be read, in the order of their numbers, and a DamagedRow for each place where one cannot.
        Pages that SQLite cannot follow are passed over in steps that double."""
        number, step = 0, 1
        while number < _LAST:
            try:
                query = f"SELECT rowid, {self._all} FROM {self.name} WHERE rowid >= ? ORDER BY rowid"
                for at, *row in db.execute(query, (number,)):
                    if at < number:
                        raise sqlite3.DatabaseError("rows out of order")
                    number, step = at + 1, 1
                    try:
                        yield self._checked(tuple(row))
                    except DamagedRow as damaged:
                        yield damaged
                return
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if step == 1:
                    yield DamagedRow(f"{self.name}: {error}")
                number, step = number + step, step * 2

    @property
    def _all(self) -> str:
        return ", ".join((*self.columns, "checksum"))

    def _checked(self, row: Row) -> Row:
        *values, told = row
        try:
            is_sound = told == _checksum(self.name, *values)
        except (TypeError, OverflowError):  # values that SQLite has and msgpack does not
            is_sound = False
        if not is_sound:
            raise DamagedRow(f"a row of {self.name}", *values)
        return tuple(values)


def register(db: sqlite3.Connection) -> None:
    db.create_function("row_checksum", -1, _checksum, deterministic=True)


def _checksum(*values: Any) -> bytes:
    return xxh3_64_digest(_encoder.encode(values))


MARK = Table("mark", ("id", "number", "at", "wall"))  # one row, id 0: see journal_clock.py; number: of the last change
CHANGE = Table("change", ("number", "at", "changes"))
SESSION = Table("session", ("id", "user", "model", "shared", "priority", "created", "used", "tokens", "parts"))
EDIT = Table("edit", ("session", "number", "names", "edit"))
EDIT_COUNT = Table("edit_count", ("session", "given"))
BREAKPOINT = Table("breakpoint", ("session", "list"))
PREFIX = Table("prefix", ("id", "model", "user", "created", "tokens"))
CONVERSATION = Table("conversation", ("session", "key", "prompt"))
RECORD = Table("record", ("user", "id", "model", "session", "created", "tokens", "body"))
PARTS = (EDIT, EDIT_COUNT, BREAKPOINT, CONVERSATION)  # rows that belong to a session, which says how many there are

# From version 5, which had no checksums.
_PARTS = (EDIT, EDIT_COUNT, BREAKPOINT)
_COUNT_PARTS = " + ".join(f"(SELECT count(*) FROM {part.name} WHERE session = session.id)" for part in _PARTS)
CHECKSUMS = (
    "CREATE TABLE mark (id INTEGER PRIMARY KEY, number INTEGER, at REAL, wall REAL, checksum BLOB);"
    f"ALTER TABLE session ADD COLUMN parts INTEGER; UPDATE session SET parts = {_COUNT_PARTS};"
    + "".join(table.add_checksums for table in (CHANGE, SESSION, *_PARTS, PREFIX))
)
