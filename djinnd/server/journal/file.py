"""The journal's file: `journal.db` in the state directory, an SQLite database that one daemon has for its whole life.

    change       the changes since the last fold, one row per commit
    session      the sessions as of the last fold
    conversation   sessions that the daemon keeps for conversations: see tables/conversations.py
    edit, edit_count   edits of sessions: see tables/edits.py
    adapter      adapters of sessions: see tables/adapters.py
    breakpoint   breakpoints of sessions: see tables/breakpoints.py
    prefix       public prefixes
    record       records: see tables/records.py
    mark         the time of the last fold, and the number of its last change

A commit is one row at the end of `change`, for any number of changes of any number of sessions. So a step of sixty
sessions costs one page of the write-ahead log; a row for each session would cost sixty pages. A fold brings the rows of
`change` into the other tables and removes them, in one transaction. It runs at start, at a clean stop, and whenever
`change` has grown to FOLD_BYTES. Until then the unfolded changes are in memory too, merged (changes.py). A
commit is a write to memory and takes 0.05 ms; slower work is done by `tidy`.

Committed changes survive the death of the process. The log is not synchronised at each commit (synchronous=NORMAL): a
power cut or a crash of the kernel may lose the last commits, but neither the file nor the order. Each row has a
checksum (tables/rows.py); damaged sessions are left out at start (database.py).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from djinnd.server.handover.socket_path import StartError
from djinnd.server.journal.changes import Change, Unfolded
from djinnd.server.journal.clock import JournalClock, resumed
from djinnd.server.journal.database import damaged_files, open_database
from djinnd.server.journal.examination import Examined, changes_in
from djinnd.server.journal.fold import Fold
from djinnd.server.journal.tables.adapters import AdapterChosen, read_adapters
from djinnd.server.journal.tables.breakpoints import read_breakpoints
from djinnd.server.journal.tables.conversations import ConversationKept, read_conversations
from djinnd.server.journal.tables.edits import read_edits
from djinnd.server.journal.tables.prefixes import Published, read_prefixes
from djinnd.server.journal.tables.records import Recorded, read_records
from djinnd.server.journal.tables.rows import CHANGE, MARK
from djinnd.server.journal.tables.sessions import JournalSession, read_sessions
from djinnd.server.probe_lists.breakpoint_list import BreakpointList
from djinnd.server.probe_lists.edit_list import EditList

NAME = "journal.db"
FOLD_BYTES = 2 << 20  # a fold takes 0.1 to 0.2 ms for each session that has changed, during which all messages wait
LOG_BYTES = 16 << 20  # of the write-ahead log; then it is copied into the file, and both are synchronised
SHORT_FOLD_BYTES, SHORT_LOG_BYTES = 64 << 10, 1 << 20  # when the disk is nearly full

_encoder = msgspec.msgpack.Encoder()


class JournalContent(NamedTuple):
    """Everything that earlier daemons have left in the journal. Sessions, prefixes and records: the oldest first."""

    sessions: list[JournalSession]
    prefixes: list[Published]
    edits: dict[str, EditList]  # by session
    breakpoints: dict[str, BreakpointList]  # by session
    conversations: dict[str, ConversationKept]  # by session
    records: list[Recorded]
    now: float  # the journal's time, the clock of the times in `sessions`
    adapters: Mapping[str, AdapterChosen] = {}  # by session


class JournalFile:
    """The open file. Used by one thread at a time. After opening, errors are sqlite3.Error."""

    def __init__(self, folder: str) -> None:
        """Raises StartError if another daemon has the folder, a later version has written there, or it cannot be
        written. Then it stays as it is."""
        self.path = Path(folder, NAME)
        self._log = Path(folder, f"{NAME}-wal")
        self._log_left = 0  # bytes of the log after the last checkpoint
        self.is_short = False  # the disk is nearly full: the log is kept short
        self._reusable = 0  # bytes of free pages in the file
        self._freed = 0  # bytes of the file that the next fold will free
        self._unfolded = Unfolded()
        self._unfolded_bytes = 0
        self._fold_left = 0  # bytes that the last fold, which failed, has left to fold
        self._db, found = open_database(self.path)
        self._damaged_files = damaged_files(self.path.parent)
        try:
            self._resume(found)
        except BaseException as error:
            self._db.close()
            if isinstance(error, (sqlite3.Error, msgspec.DecodeError, ValueError)):
                raise StartError(f"{self.path} cannot be used: {error}") from error
            raise

    def _resume(self, found: Examined) -> None:
        self._number, last = found.folded or 0, None
        for row in CHANGE.read(self._db, "ORDER BY number"):
            self._number, last, _ = row
            self._unfolded.add(last, changes_in(row))
        if last is None and found.mark is None:
            (last,) = self._db.execute("SELECT max(used) FROM session").fetchone()
        self.clock = JournalClock(resumed(found.mark, last, time.time()))
        self.fold()
        self._count_reusable()

    @property
    def damaged_files(self) -> list[Path]:
        """Files that earlier damage has left and that still exist."""
        return [path for path in self._damaged_files if path.exists()]

    def content(self) -> JournalContent:
        """Everything in the journal, as of the last fold."""
        return JournalContent(
            list(read_sessions(self._db, "ORDER BY created")),
            list(read_prefixes(self._db)),
            read_edits(self._db),
            read_breakpoints(self._db),
            read_conversations(self._db),
            list(read_records(self._db)),
            self.clock.now(),
            read_adapters(self._db),
        )

    def append(self, changes: Sequence[Change]) -> None:
        """Commits the changes, all or none."""
        encoded, at = _encoder.encode(changes), self.clock.now()
        CHANGE.write(self._db, [(self._number + 1, at, encoded)])
        self._number += 1
        self._unfolded.add(at, changes)
        self._unfolded_bytes += len(encoded)

    def freed(self, nbytes: int) -> None:
        """Notes bytes that a change frees, which is appended or about to be."""
        self._freed += nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are free for the copies (space.py) of changes to come.

        Two copies go to the log, which needs free disk. Two go to the file, which also has room in its free pages; the
        content of the log and the unfolded changes go there first.
        """
        status = os.statvfs(self.path.parent)
        disk = status.f_bavail * status.f_frsize
        file = disk + self._reusable + self._freed - self._log_bytes - 2 * self._unfolded_bytes
        return max(0, min(2 * (disk - self._unfolded_bytes), file))

    @property
    def needs_tidying(self) -> bool:
        return self._is_full or self._is_long

    def tidy(self) -> None:
        """Folds and checkpoints as far as necessary. Raises ValueError, see `fold`. After a failure it is tried again
        after the same number of further bytes."""
        if self.is_short and self._is_long:  # makes room for the fold
            with suppress(sqlite3.Error):
                self.empty_log()
        try:
            if self._is_full:
                self.fold()
        finally:
            if self._is_long:
                self.empty_log()

    def empty_log(self) -> None:
        """Copies the log into the file, and frees its room on the disk."""
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._log_left = self._log_bytes

    @property
    def _is_full(self) -> bool:
        return self._to_fold >= self._fold_left + (SHORT_FOLD_BYTES if self.is_short else FOLD_BYTES)

    @property
    def _to_fold(self) -> int:
        """Bytes to fold. While the disk is nearly full, bytes that a fold would free count too."""
        return self._unfolded_bytes + (self._freed if self.is_short else 0)

    @property
    def _is_long(self) -> bool:
        return self._log_bytes >= self._log_left + (SHORT_LOG_BYTES if self.is_short else LOG_BYTES)

    @property
    def _log_bytes(self) -> int:
        try:
            return os.stat(self._log).st_size
        except OSError:  # another program has removed it
            return 0

    def fold(self) -> None:
        """Folds all changes into the tables. Raises ValueError if a change does not fit its session."""
        self._fold_left, freed = self._to_fold, self._freed
        if not self._unfolded:
            return
        fold = Fold(self._db)
        for at, change in self._unfolded:
            fold.apply(at, change)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            fold.write()
            self._db.execute("DELETE FROM change")
            self._write_mark()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._unfolded.clear()
        self._fold_left = self._unfolded_bytes = 0
        self._freed -= freed
        self._count_reusable()

    def _count_reusable(self) -> None:
        ((pages,),), ((nbytes,),) = (self._db.execute(f"PRAGMA {name}") for name in ("freelist_count", "page_size"))
        self._reusable = pages * nbytes

    def leave(self) -> None:
        """Called at a clean stop, before `close`: folds all changes and stores the time."""
        self.fold()
        self._write_mark()

    def close(self) -> None:
        self._db.close()

    def _write_mark(self) -> None:
        MARK.write(self._db, [(0, self._number, *self.clock.mark())])
