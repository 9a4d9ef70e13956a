"""The edits of sessions in the journal's file: their changes, and a table with a row for each edit.

Edits have a table of their own, so that a session that only grows does not rewrite its edits, which may be megabytes.
Changes of edits name positions and not tokens. So they can be replayed by themselves, in their own order.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from djinnd.core.edits import Edit
from djinnd.server.journal.tables.rows import EDIT, EDIT_COUNT, Row
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

_encode = msgspec.msgpack.Encoder().encode
_edit = msgspec.msgpack.Decoder(Edit)
_names = msgspec.msgpack.Decoder(list[str])


def read_edits(db: sqlite3.Connection, where: str = "", values: Row = ()) -> dict[str, EditList]:
    """Reads edits by session, of all sessions that ever had any. `where` selects sessions. Raises DamagedRow."""
    lists: dict[str, EditList] = defaultdict(EditList)
    for name, _, names, edit in EDIT.read(db, f"{where} ORDER BY session, number", values):
        lists[name].add(_edit.decode(edit), _names.decode(names))
    for name, given in EDIT_COUNT.read(db, where, values):
        lists[name].given = given
    return dict(lists)


def write_edits(db: sqlite3.Connection, session: str, stored: Sequence[Edit], edits: EditList) -> None:
    """Writes the edits of a session that has these `stored`. Writes only rows that have changed."""
    was = {edit.number: edit for edit in stored}
    EDIT.delete(db, [(session, number) for number in was.keys() - edits.names.keys()])
    changed = [edit for edit in edits.edits if was.get(edit.number) != edit]
    EDIT.write(db, [(session, each.number, _encode(edits.names[each.number]), _encode(each)) for each in changed])
    EDIT_COUNT.write(db, [(session, edits.given)])
