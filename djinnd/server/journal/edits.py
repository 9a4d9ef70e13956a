"""The edits of sessions in the journal's file: their changes, and a table with a row for each edit.

Edits have a table of their own, so that a session that only grows does not rewrite its edits, which may be megabytes.
Changes of edits name positions and not tokens. So they can be replayed by themselves, in their own order.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from djinnd.core.edits import Edit
from djinnd.server.journal.fold import SessionFold
from djinnd.server.journal.rows import EDIT, EDIT_COUNT, Row
from djinnd.server.probe_lists.edit_list import EditList

TABLES = """
    CREATE TABLE edit (session TEXT, number INTEGER, names BLOB, edit BLOB, PRIMARY KEY (session, number));
    CREATE TABLE edit_count (session TEXT PRIMARY KEY, given INTEGER);
"""  # given: the last number that the session has given to an edit, which may be gone


class Edited(msgspec.Struct, array_like=True, tag="edited", frozen=True):
    """An edit was added to the session."""

    session: str
    edit: Edit
    names: Sequence[str]  # of its points, as the client gave them


class EditsEnded(msgspec.Struct, array_like=True, tag="edits_ended", frozen=True):
    """The edits change nothing from position `at` on."""

    session: str
    numbers: list[int]
    at: int


class EditsCut(msgspec.Struct, array_like=True, tag="edits_cut", frozen=True):
    """The session was cut to `length` tokens, and its edits with it."""

    session: str
    length: int


EditChange = Edited | EditsEnded | EditsCut

_encoder = msgspec.msgpack.Encoder()
_edit = msgspec.msgpack.Decoder(Edit)
_names = msgspec.msgpack.Decoder(list[str])


def read_edits(db: sqlite3.Connection, session: str | None = None) -> dict[str, EditList]:
    """Reads edits by session: of one session, or of all that ever had any. Raises DamagedRow."""
    where, values = ("WHERE session = ?", (session,)) if session is not None else ("", Row())
    lists: dict[str, EditList] = defaultdict(EditList)
    for name, _, names, edit in EDIT.read(db, f"{where} ORDER BY session, number", values):
        lists[name].add(_edit.decode(edit), _names.decode(names))
    for name, given in EDIT_COUNT.read(db, where, values):
        lists[name].given = given
    return dict(lists)


class EditFold(SessionFold[EditList]):
    """Applies one fold's changes to the edits of the sessions that they concern. Writes only rows that have changed."""

    _tables = ("edit", "edit_count")

    def __init__(self, db: sqlite3.Connection, exists: Callable[[str], bool]) -> None:
        super().__init__(db, exists)
        self._were: dict[str, EditList] = {}

    def apply(self, change: EditChange) -> None:
        if not self._exists(change.session):
            return
        edits = self._of(change.session)
        match change:
            case Edited(_, edit, names):
                edits.add(edit, names)
            case EditsEnded(_, numbers, at):
                edits.end(numbers, at)
            case EditsCut(_, length):
                edits.cut(length)

    def write(self) -> None:
        """Writes the changed rows, in the fold's transaction."""
        self._forget_closed()
        for session, edits in self._are.items():
            was = {edit.number: edit for edit in self._were[session].edits}
            gone = [(session, number) for number in was.keys() - edits.names.keys()]
            rows = [
                EDIT.sealed(session, edit.number, _encoder.encode(edits.names[edit.number]), _encoder.encode(edit))
                for edit in edits.edits
                if was.get(edit.number) != edit
            ]
            self._db.executemany("DELETE FROM edit WHERE session = ? AND number = ?", gone)
            self._db.executemany(EDIT.insert, rows)
            self._db.execute(EDIT_COUNT.insert, EDIT_COUNT.sealed(session, edits.given))

    def _of(self, session: str) -> EditList:
        if session not in self._are:
            self._were[session] = read_edits(self._db, session).get(session, EditList())
            self._are[session] = self._were[session].copy()
        return self._are[session]
