"""A fold: brings the changes since the last one into the tables of the journal's file."""

from __future__ import annotations

import sqlite3
from array import array

from msgspec.structs import astuple

from djinnd.core.edits import Edit
from djinnd.server.journal.changes import Change, Closed, Extended, Reclassified, SessionAdded
from djinnd.server.journal.tables.adapters import AdapterChosen
from djinnd.server.journal.tables.breakpoints import (
    BreakpointsEnded,
    BreakpointSet,
    Stopped,
    breakpoint_row,
    read_breakpoints,
)
from djinnd.server.journal.tables.conversations import ConversationKept
from djinnd.server.journal.tables.edits import Edited, EditsCut, EditsEnded, read_edits, write_edits
from djinnd.server.journal.tables.prefixes import Published, Withdrawn
from djinnd.server.journal.tables.records import Recorded, Unrecorded
from djinnd.server.journal.tables.rows import ADAPTER, BREAKPOINT, CONVERSATION, PARTS, PREFIX, RECORD, SESSION
from djinnd.server.journal.tables.sessions import TOKEN, JournalSession, read_sessions
from djinnd.server.probe_lists.breakpoint_list import BreakpointList
from djinnd.server.probe_lists.edit_list import EditList

_SESSION = "WHERE session = ?"


class Fold:
    """Applies changes to copies in memory of the values that they concern. `write` then writes the copies. None stands
    for a value that is not in the file, or no longer."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._sessions: dict[str, JournalSession | None] = {}
        self._prefixes: dict[str, Published | None] = {}
        self._records: dict[tuple[int, str], Recorded | None] = {}
        # The parts of sessions, by session.
        self._edits: dict[str, EditList] = {}
        self._stored_edits: dict[str, tuple[Edit, ...]] = {}  # as they are in the file
        self._breakpoints: dict[str, BreakpointList] = {}
        self._conversations: dict[str, ConversationKept] = {}
        self._adapters: dict[str, AdapterChosen] = {}

    def apply(self, at: float, change: Change) -> None:
        """Applies a change of this time. Raises ValueError if it does not fit its session."""
        match change:
            case SessionAdded(name, user, model, shared, priority, created):
                self._sessions[name] = JournalSession(name, user, model, shared, priority, created, at, array(TOKEN))
            case Closed(name):
                self._sessions[name] = None
                for parts in (self._edits, self._breakpoints, self._conversations, self._adapters):
                    parts.pop(name, None)
            case Published(prefix):
                self._prefixes[prefix] = change
            case Withdrawn(prefix):
                self._prefixes[prefix] = None
            case Recorded(user, record):
                self._records[user, record] = change
            case Unrecorded(user, record):
                self._records[user, record] = None
            case _:
                session = self._session(change.session)
                if session is not None:  # else its call was cancelled by the close
                    self._change(session, at, change)

    def _change(self, session: JournalSession, at: float, change: Change) -> None:
        match change:
            case Reclassified(_, priority):
                session.priority = priority
            case Extended(name, start, tokens):
                if len(session.tokens) < start:
                    raise ValueError(f"session {name} has {len(session.tokens)} tokens, a change begins at {start}")
                del session.tokens[start:]
                session.tokens.extend(tokens)
                session.used = at
            case ConversationKept(name):
                self._conversations[name] = change
            case AdapterChosen(name):
                self._adapters[name] = change
            case Edited(name, edit, names):
                self._edits_of(name).add(edit, names)
            case EditsEnded(name, numbers, position):
                self._edits_of(name).end(numbers, position)
            case EditsCut(name, length):
                self._edits_of(name).cut(length)
            case BreakpointSet(name, breakpoint):
                self._breakpoints_of(name).add(breakpoint)
            case BreakpointsEnded(name, numbers):
                self._breakpoints_of(name).end(numbers)
            case Stopped(name, hit):
                self._breakpoints_of(name).hit = hit

    def write(self) -> None:
        """Writes all values that have changed. Belongs in a transaction."""
        db = self._db
        for table in (SESSION, *PARTS):
            table.delete(db, [(name,) for name, session in self._sessions.items() if session is None])
        for name, edits in self._edits.items():
            write_edits(db, name, self._stored_edits[name], edits)
        BREAKPOINT.write(db, [breakpoint_row(*each) for each in self._breakpoints.items()])
        CONVERSATION.write(db, map(astuple, self._conversations.values()))
        ADAPTER.write(db, map(astuple, self._adapters.values()))
        for name in self._edits.keys() | self._breakpoints.keys() | self._conversations.keys() | self._adapters.keys():
            if (session := self._sessions[name]) is not None:
                session.parts = self._count_parts(name)
        SESSION.write(db, [each.row for each in self._sessions.values() if each is not None])
        PREFIX.delete(db, [(name,) for name, prefix in self._prefixes.items() if prefix is None])
        PREFIX.write(db, [each.row for each in self._prefixes.values() if each is not None])
        RECORD.delete(db, [name for name, record in self._records.items() if record is None])
        RECORD.write(db, [astuple(each) for each in self._records.values() if each is not None])

    def _session(self, name: str) -> JournalSession | None:
        if name not in self._sessions:
            self._sessions[name] = next(read_sessions(self._db, "WHERE id = ?", (name,)), None)
        return self._sessions[name]

    def _edits_of(self, session: str) -> EditList:
        if session not in self._edits:
            edits = self._edits[session] = read_edits(self._db, _SESSION, (session,)).get(session, EditList())
            self._stored_edits[session] = edits.edits
        return self._edits[session]

    def _breakpoints_of(self, session: str) -> BreakpointList:
        if session not in self._breakpoints:
            stored = read_breakpoints(self._db, _SESSION, (session,))
            self._breakpoints[session] = stored.get(session, BreakpointList())
        return self._breakpoints[session]

    def _count_parts(self, session: str) -> int:
        counts = (f"SELECT count(*) FROM {part.name} {_SESSION}" for part in PARTS)
        return sum(self._db.execute(count, (session,)).fetchone()[0] for count in counts)
