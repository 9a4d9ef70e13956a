"""The breakpoints of sessions in the journal's file: their changes, and a table.

They are few and small, so one row holds all breakpoints of a session, and is rewritten at each change.
"""

from __future__ import annotations

import sqlite3

import msgspec

from djinn_client.protocol.fields.breakpoints import HitInfo
from djinnd.server.journal.tables.rows import BREAKPOINT, Row
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, SessionBreakpoint

TABLES = "CREATE TABLE breakpoint (session TEXT PRIMARY KEY, list BLOB);"


class BreakpointSet(msgspec.Struct, array_like=True, tag="broken", frozen=True):
    """A breakpoint was added to the session."""

    session: str
    breakpoint: SessionBreakpoint


class BreakpointsEnded(msgspec.Struct, array_like=True, tag="breakpoints_ended", frozen=True):
    """Breakpoints were removed from the session."""

    session: str
    numbers: list[int]


class Stopped(msgspec.Struct, array_like=True, tag="stopped", frozen=True):
    """The session's last call has stopped at this hit. None: a later call has continued from it, or the session was
    cut."""

    session: str
    hit: HitInfo | None


BreakpointChange = BreakpointSet | BreakpointsEnded | Stopped

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BreakpointList)


def read_breakpoints(db: sqlite3.Connection, where: str = "", values: Row = ()) -> dict[str, BreakpointList]:
    """Reads breakpoints by session, of all sessions that ever had any. `where` selects sessions. Raises DamagedRow."""
    return {name: _decoder.decode(encoded) for name, encoded in BREAKPOINT.read(db, where, values)}


def breakpoint_row(session: str, breakpoints: BreakpointList) -> Row:
    return session, _encoder.encode(breakpoints)
