"""The tables of the journal's file. Each row ends with a checksum of its other values.

SQLite detects a broken page structure, but not a flipped bit in a value, which would turn a token into another one. The
checksum (XXH3, 64 bits) covers the table's name and the row's values, so a row cannot pass for one of another table.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from xxhash import xxh3_64_digest

Row = tuple[Any, ...]  # the values, without the checksum

_LAST = 1 << 62  # above the number of any row
_encoder = msgspec.msgpack.Encoder()


class DamagedRow(ValueError):
    """A row with a checksum that does not match its values."""


@dataclass(frozen=True)
class ChecksumTable:
    """One table with checksums."""

    name: str
    columns: tuple[str, ...]

    @property
    def add_checksums(self) -> str:
        """SQL that adds checksums to a table of a version that had none. Needs `register`."""
        values = f"row_checksum('{self.name}', {', '.join(self.columns)})"
        return f"ALTER TABLE {self.name} ADD COLUMN checksum BLOB; UPDATE {self.name} SET checksum = {values};"

    @cached_property
    def _insert(self) -> str:
        return f"INSERT OR REPLACE INTO {self.name} VALUES ({', '.join('?' * (len(self.columns) + 1))})"

    def write(self, db: sqlite3.Connection, rows: Iterable[Row]) -> None:
        """Writes rows with their checksums, in place of rows with the same keys. Numbers must have their column's type:
        no bool for an int."""
        for row in rows:
            db.execute(self._insert, (*row, _checksum(self.name, *row)))

    def delete(self, db: sqlite3.Connection, keys: Iterable[Row]) -> None:
        """Deletes rows. A key has the values of the first columns, at least one."""
        for key in keys:
            where = " AND ".join(f"{column} = ?" for column in self.columns[: len(key)])
            db.execute(f"DELETE FROM {self.name} WHERE {where}", key)

    def read(self, db: sqlite3.Connection, where: str = "", values: Row = ()) -> Iterator[Row]:
        """Reads rows and checks them. Raises DamagedRow."""
        for row in db.execute(f"SELECT {self._all} FROM {self.name} {where}", values):
            yield self._checked(row)

    def scan(self, db: sqlite3.Connection) -> Iterator[Row | DamagedRow]:
        """Yields each readable row in the order of row numbers, and a DamagedRow for each place that is not readable.
        Skips pages that SQLite cannot follow in steps that double."""
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
        except (TypeError, OverflowError):  # values that SQLite can hold and msgpack cannot
            is_sound = False
        if not is_sound:
            raise DamagedRow(f"a row of {self.name}", *values)
        return tuple(values)


def register(db: sqlite3.Connection) -> None:
    """Makes `row_checksum` available to SQL."""
    db.create_function("row_checksum", -1, _checksum, deterministic=True)


def _checksum(*values: Any) -> bytes:
    return xxh3_64_digest(_encoder.encode(values))


MARK = ChecksumTable("mark", ("id", "number", "at", "wall"))  # one row, id 0; number: of the last folded change
CHANGE = ChecksumTable("change", ("number", "at", "changes"))
SESSION = ChecksumTable("session", ("id", "user", "model", "shared", "priority", "created", "used", "tokens", "parts"))
EDIT = ChecksumTable("edit", ("session", "number", "names", "edit"))
EDIT_COUNT = ChecksumTable("edit_count", ("session", "given"))
BREAKPOINT = ChecksumTable("breakpoint", ("session", "list"))
PREFIX = ChecksumTable("prefix", ("id", "model", "user", "created", "tokens"))
CONVERSATION = ChecksumTable("conversation", ("session", "key", "prompt"))
ADAPTER = ChecksumTable("adapter", ("session", "name", "identity"))
RECORD = ChecksumTable("record", ("user", "id", "model", "session", "created", "tokens", "body"))
PARTS = (EDIT, EDIT_COUNT, BREAKPOINT, CONVERSATION, ADAPTER)  # rows of a session, which stores their number

# Upgrade of version 5, which had no checksums.
_PARTS = (EDIT, EDIT_COUNT, BREAKPOINT)
_COUNT_PARTS = " + ".join(f"(SELECT count(*) FROM {part.name} WHERE session = session.id)" for part in _PARTS)
CHECKSUMS = (
    "CREATE TABLE mark (id INTEGER PRIMARY KEY, number INTEGER, at REAL, wall REAL, checksum BLOB);"
    f"ALTER TABLE session ADD COLUMN parts INTEGER; UPDATE session SET parts = {_COUNT_PARTS};"
    + "".join(table.add_checksums for table in (CHANGE, SESSION, *_PARTS, PREFIX))
)
