"""The journal's file: `journal.db` in the state directory, SQLite, one daemon's for as long as that lives.

    change    what has happened since the last fold, a row a commit
    session   the sessions as they were at the last fold
    edit      their edits, likewise: see journal_edits.py
    breakpoint   and breakpoints: see journal_breakpoints.py

A commit is one row at the end of `change`, whatever happened to however many sessions: a step of sixty sessions costs
one page of the write-ahead log, where a row of each would cost sixty. Folding brings the rows of `change` into
the other tables and removes them, in one transaction: at start, and whenever `change` has grown to FOLD_BYTES. Until
then what is to be folded is in memory, too, in as few changes as say the same (journal_changes.py). A commit is a write
to memory, and takes a twentieth of a millisecond; what takes longer, `tidy` does.

What is committed survives the death of the process. The log is not synchronised with each commit (synchronous=NORMAL):
a power cut or a crash of the kernel may lose the last commits, never the file and never the order.
"""

from __future__ import annotations

import os
import sqlite3
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from djinn_client.protocol import Class
from djinnd.server import journal_breakpoints, journal_edits
from djinnd.server.breakpoint_list import BreakpointList
from djinnd.server.edit_list import EditList
from djinnd.server.journal_breakpoints import BreakpointFold, BreakpointsEnded, Broken, Stopped
from djinnd.server.journal_changes import (
    Change,
    Closed,
    Extended,
    Opened,
    Published,
    Reclassified,
    Unfolded,
    Withdrawn,
)
from djinnd.server.journal_edits import Edited, EditFold, EditsCut, EditsEnded
from djinnd.server.socket_path import StartError

NAME = "journal.db"
FOLD_BYTES = 2 << 20  # a fold takes 0.1 to 0.2 ms a session that has changed, and nobody is told anything meanwhile
LOG_BYTES = 16 << 20  # of the write-ahead log, after which it is copied into the file, and both are synchronised

_TOKEN = "I"  # an array of them is what a session's blob holds: uint32
_UPGRADES = (  # of tables and changes, from each version to the next; a new file is of version 0
    """
    CREATE TABLE session (
        id TEXT PRIMARY KEY, user INTEGER, model TEXT, shared INTEGER, priority TEXT,
        created REAL, used REAL, tokens BLOB
    );
    CREATE TABLE change (number INTEGER PRIMARY KEY, at REAL, changes BLOB);
    """,
    "CREATE TABLE prefix (id TEXT PRIMARY KEY, model TEXT, user INTEGER, created REAL, tokens BLOB);",
    "",  # Reclassified may be among the changes
    journal_edits.TABLES,
    journal_breakpoints.TABLES,
)
VERSION = len(_UPGRADES)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Change])


@dataclass(slots=True)
class KeptSession:
    """A session as the journal has it. Times are seconds since 1970; `used` is that of its tokens' last
    change."""

    id: str
    user: int
    model: str
    shared: bool
    priority: Class
    created: float
    used: float
    tokens: array[int]


class JournalFile:
    """Open until `close`. For one thread at a time. Once it is open, what fails raises sqlite3.Error."""

    def __init__(self, folder: str) -> None:
        """Raises StartError where the folder is another daemon's, or what is there cannot be used. It is left alone
        then: whether sessions may be lost is not for a daemon to decide."""
        self.path = Path(folder, NAME)
        self._log = Path(folder, f"{NAME}-wal")
        self._log_limit = LOG_BYTES
        self._unfolded = Unfolded()
        self._unfolded_bytes = 0
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # SQLite would make it readable to others; its other files follow this one
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StartError(f"no journal at {self.path}: {error}; choose another place with --state-dir") from error
        try:
            self._prepare()
            for at, encoded in self._db.execute("SELECT at, changes FROM change ORDER BY number"):
                self._unfolded.add(at, _decoder.decode(encoded))
            self.fold()
        except BaseException as error:
            self._db.close()
            if isinstance(error, (sqlite3.Error, msgspec.DecodeError, ValueError)):
                raise StartError(self._told(error)) from error
            raise

    def sessions(self) -> list[KeptSession]:
        """As of the last fold."""
        columns = "id, user, model, shared, priority, created, used, tokens"
        rows = self._db.execute(f"SELECT {columns} FROM session ORDER BY created")
        return [_kept(*row) for row in rows]

    def prefixes(self) -> list[Published]:
        """As of the last fold."""
        rows = self._db.execute("SELECT id, model, user, created, tokens FROM prefix ORDER BY created")
        return [
            Published(name, model, user, created, array(_TOKEN, tokens).tolist())
            for name, model, user, created, tokens in rows
        ]

    def edits(self) -> dict[str, EditList]:
        """By session, as of the last fold."""
        return journal_edits.read_edits(self._db)

    def breakpoints(self) -> dict[str, BreakpointList]:
        """Likewise."""
        return journal_breakpoints.read_breakpoints(self._db)

    def append(self, changes: Sequence[Change]) -> None:
        """Commits them: all or none."""
        encoded, at = _encoder.encode(changes), time.time()
        self._db.execute("INSERT INTO change (at, changes) VALUES (?, ?)", (at, encoded))
        self._unfolded.add(at, changes)
        self._unfolded_bytes += len(encoded)

    @property
    def wants_tidying(self) -> bool:
        return self._is_full or self._log_bytes >= self._log_limit

    def tidy(self) -> None:
        """Raises ValueError, see `fold`. What fails is tried again when as much has come."""
        if self._is_full:
            self.fold()
        if self._log_bytes >= self._log_limit:
            try:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                self._log_limit = self._log_bytes + LOG_BYTES

    @property
    def _is_full(self) -> bool:
        return self._unfolded_bytes >= FOLD_BYTES

    @property
    def _log_bytes(self) -> int:
        try:
            return os.stat(self._log).st_size
        except OSError:  # somebody has removed it
            return 0

    def fold(self) -> None:
        """Raises ValueError where changes do not fit the sessions."""
        self._unfolded_bytes = 0  # also where it fails: it is tried again when as much has come
        if not self._unfolded:
            return
        images: dict[str, KeptSession | None] = {}
        prefixes: dict[str, Published | None] = {}

        def exists(session: str) -> bool:
            return self._image(session, images) is not None

        edits, breakpoints = EditFold(self._db, exists), BreakpointFold(self._db, exists)
        for at, change in self._unfolded:
            self._apply(change, at, images, prefixes, edits, breakpoints)
        gone = [(name,) for name, image in images.items() if image is None]
        kept = [_row(image) for image in images.values() if image is not None]
        withdrawn = [(name,) for name, prefix in prefixes.items() if prefix is None]
        published = [_prefix_row(prefix) for prefix in prefixes.values() if prefix is not None]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("DELETE FROM session WHERE id = ?", gone)
            self._db.executemany("INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?, ?, ?, ?, ?)", kept)
            edits.write()
            breakpoints.write()
            self._db.executemany("DELETE FROM prefix WHERE id = ?", withdrawn)
            self._db.executemany("INSERT OR REPLACE INTO prefix VALUES (?, ?, ?, ?, ?)", published)
            self._db.execute("DELETE FROM change")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._unfolded.clear()

    def close(self) -> None:
        self._db.close()

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # from the first read on; no shared index file is needed then
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # `tidy` does it
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not tables:
            version = 0
        elif not 1 <= version <= VERSION:
            raise StartError(
                f"{self.path} has version {version} and this djinnd reads {VERSION}: start the djinnd that wrote it, "
                "or move the file away to begin without its sessions"
            )
        if version < VERSION:
            upgrade = "".join(_UPGRADES[version:])
            db.executescript(f"BEGIN; {upgrade} PRAGMA user_version = {VERSION}; COMMIT;")

    def _told(self, error: Exception) -> str:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return f"{self.path.parent} is the state directory of a daemon that runs: stop it, or use --state-dir"
        return f"{self.path} cannot be used: {error}; repair it, or move it away to begin without its sessions"

    def _apply(
        self,
        change: Change,
        at: float,
        images: dict[str, KeptSession | None],
        prefixes: dict[str, Published | None],
        edits: EditFold,
        breakpoints: BreakpointFold,
    ) -> None:
        match change:
            case Opened(session, user, model, shared, priority, created):
                images[session] = KeptSession(session, user, model, shared, priority, created, at, array(_TOKEN))
            case Reclassified(session, priority):
                image = self._image(session, images)
                if image is not None:
                    image.priority = priority
            case Closed(session):
                images[session] = None
                edits.closed(session)
                breakpoints.closed(session)
            case Edited() | EditsEnded() | EditsCut():
                edits.apply(change)
            case Broken() | BreakpointsEnded() | Stopped():
                breakpoints.apply(change)
            case Published(prefix):
                prefixes[prefix] = change
            case Withdrawn(prefix):
                prefixes[prefix] = None
            case Extended(session, start, tokens):
                image = self._image(session, images)
                if image is None:
                    return  # a call that its close has cancelled brought one more token
                if len(image.tokens) < start:
                    raise ValueError(f"session {session} has {len(image.tokens)} tokens, a change begins at {start}")
                del image.tokens[start:]
                image.tokens.extend(tokens)
                image.used = at

    def _image(self, session: str, images: dict[str, KeptSession | None]) -> KeptSession | None:
        if session not in images:
            images[session] = self._read(session)
        return images[session]

    def _read(self, session: str) -> KeptSession | None:
        columns = "id, user, model, shared, priority, created, used, tokens"
        row = self._db.execute(f"SELECT {columns} FROM session WHERE id = ?", (session,)).fetchone()
        return None if row is None else _kept(*row)


def _kept(
    name: str, user: int, model: str, shared: int, priority: Class, created: float, used: float, tokens: bytes
) -> KeptSession:
    return KeptSession(name, user, model, bool(shared), priority, created, used, array(_TOKEN, tokens))


def _row(image: KeptSession) -> tuple[str, int, str, bool, str, float, float, bytes]:
    tokens = image.tokens.tobytes()
    return (image.id, image.user, image.model, image.shared, image.priority, image.created, image.used, tokens)


def _prefix_row(prefix: Published) -> tuple[str, str, int, float, bytes]:
    return (prefix.prefix, prefix.model, prefix.user, prefix.created, array(_TOKEN, prefix.tokens).tobytes())
