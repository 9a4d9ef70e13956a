"""The journal's database: opens it, upgrades it to this version, and replaces a damaged one by its sound content.

A damaged file is kept beside the new one as `journal.db.damaged-DATE`, for people. djinnd never reads it again.
"""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from djinn_client.handover.saved_session import sync_folder
from djinnd.server.handover.socket_path import StartError
from djinnd.server.journal.examination import Examined, changes_in, examine
from djinnd.server.journal.tables import adapters as journal_adapters
from djinnd.server.journal.tables import breakpoints as journal_breakpoints
from djinnd.server.journal.tables import conversations as journal_conversations
from djinnd.server.journal.tables import edits as journal_edits
from djinnd.server.journal.tables import records as journal_records
from djinnd.server.journal.tables.rows import (
    CHANGE,
    CHECKSUMS,
    MARK,
    PARTS,
    PREFIX,
    RECORD,
    SESSION,
    ChecksumTable,
    DamagedRow,
    Row,
    register,
)

log = logging.getLogger("djinnd.server")

KEPT_DAMAGED = 3  # files; the oldest beyond them are removed
_TOLD = 100  # damaged sessions that are named in the log
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

_UPGRADES = (  # steps of the schema from each version to the next; a new file has version 0
    """
    CREATE TABLE session (
        id TEXT PRIMARY KEY, user INTEGER, model TEXT, shared INTEGER, priority TEXT,
        created REAL, used REAL, tokens BLOB
    );
    CREATE TABLE change (number INTEGER PRIMARY KEY, at REAL, changes BLOB);
    """,
    "CREATE TABLE prefix (id TEXT PRIMARY KEY, model TEXT, user INTEGER, created REAL, tokens BLOB);",
    "",  # from here on Reclassified may be among the changes
    journal_edits.TABLES,
    journal_breakpoints.TABLES,
    CHECKSUMS,
    journal_conversations.TABLES,
    journal_records.TABLES,
    journal_adapters.TABLES,
)
VERSION = len(_UPGRADES)

_encoder = msgspec.msgpack.Encoder()


def open_database(path: Path) -> tuple[sqlite3.Connection, Examined]:
    """Opens the database, and locks it for this process. Raises StartError if another daemon has it, a later version
    wrote it, or it cannot be written; then the file stays as it is."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # SQLite would let others read it; its other files get this one's mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        db = _connected(path)
    except (OSError, sqlite3.Error) as error:
        raise StartError(f"no journal at {path}: {error}; choose another place with --state-dir") from error
    try:
        found = _examined(db, path)
        if found.is_sound:
            return db, found
        db.close()
        _repair(path)
        db = _connected(path)
        return db, _examined(db, path)
    except BaseException as error:
        db.close()
        if isinstance(error, (sqlite3.Error, OSError)):
            raise StartError(_told(path, error)) from error
        raise


def damaged_files(folder: Path) -> list[Path]:
    """Damaged files that were set aside, the oldest first."""
    return sorted(path for path in folder.glob("*.damaged-*") if not path.name.endswith("-wal"))


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    register(db)
    return db


def _examined(db: sqlite3.Connection, path: Path) -> Examined:
    """Prepares and examines the database. Raises StartError, and sqlite3.Error for errors that are no damage."""
    try:
        _prepare(db, path)
        ((structure,),) = db.execute("PRAGMA integrity_check(1)")
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # UnicodeDecodeError: the message quotes damaged bytes
        if not _is_damage(error):
            raise
        structure = str(error)
    if structure != "ok":
        return Examined(losses=[structure])
    return examine(db)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA locking_mode = EXCLUSIVE")  # from the first read on; needs no shared index file
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA secure_delete = FAST")  # else closing a large session writes zeros of its size to the log
    db.execute("PRAGMA wal_autocheckpoint = 0")  # JournalFile.tidy does it
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        version = 0
    elif not 1 <= version <= VERSION:
        raise StartError(
            f"{path} has version {version} and this djinnd reads {VERSION}: start the djinnd that wrote it, "
            "or move the file away to begin without its sessions"
        )
    if version < VERSION:
        upgrade = "".join(_UPGRADES[version:])
        db.executescript(f"BEGIN; {upgrade} PRAGMA user_version = {VERSION}; COMMIT;")


def _is_damage(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGE


def _told(path: Path, error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return f"{path.parent} is the state directory of a daemon that runs: stop it, or use --state-dir"
    return f"{path} cannot be used: {error}; repair it, or move it away to begin without its sessions"


# --- damage ---------------------------------------------------------------------------------------------------------


def _repair(path: Path) -> None:
    """Replaces a damaged file by a sound one with all its undamaged sessions."""
    new = path.with_name(f"{path.name}.new")
    _remove(new)
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(_connected(path)) as old, closing(_connected(new)) as into:
        for setting in ("writable_schema = ON", "cell_size_check = ON", "locking_mode = EXCLUSIVE"):
            with suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # for a file that SQLite cannot read at all
                old.execute(f"PRAGMA {setting}")  # writable_schema: a file that was cut is read up to its end
        found = examine(old)
        _prepare(into, new)
        kept = _copy(old, into, found)
        into.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    aside = _set_aside(path, new)
    for session, what in itertools.islice(found.damaged.items(), _TOLD):
        log.error("journal_session_damaged session=%s what=%s", session, what)
    log.error(
        "journal_repaired path=%s sessions=%d damaged_sessions=%d lost_rows=%d first=%s kept_aside=%s",
        *(path, kept, len(found.damaged), len(found.losses), (found.losses or ["the structure"])[0], aside),
    )


def _copy(old: sqlite3.Connection, into: sqlite3.Connection, found: Examined) -> int:
    """Copies the undamaged sessions of the tables with all their rows, and their changes. Returns the number of
    sessions."""
    into.execute("BEGIN")
    if found.mark is not None:
        MARK.write(into, [(0, 0, *found.mark)])
    for table in (SESSION, *PARTS):
        table.write(into, (row for row in _sound(old, table) if found.is_whole(row[0])))
    for table in (PREFIX, RECORD):
        table.write(into, _sound(old, table))
    CHANGE.write(into, _renumbered(old, found))
    into.execute("COMMIT")
    sessions: int = into.execute("SELECT count(*) FROM session").fetchone()[0]
    return sessions


def _sound(old: sqlite3.Connection, table: ChecksumTable) -> Iterable[Row]:
    return (row for row in table.scan(old) if not isinstance(row, DamagedRow))


def _renumbered(old: sqlite3.Connection, found: Examined) -> Iterable[Row]:
    for number, row in enumerate(_sound(old, CHANGE), 1):
        changes = [change for change in changes_in(row) if found.keeps(change)]
        yield (number, row[1], _encoder.encode(changes))


def _set_aside(path: Path, new: Path) -> Path:
    """Keeps the damaged file under another name and puts `new` in its place, atomically: there is a file at all
    times."""
    now = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9)) + f".{now % 10**9:09d}Z"
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    with suppress(FileNotFoundError):
        os.rename(f"{path}-wal", f"{aside}-wal")  # it belongs to the old file, and would be applied to the new one
    os.link(path, aside)
    os.replace(new, path)
    sync_folder(path.parent)
    for older in damaged_files(path.parent)[:-KEPT_DAMAGED]:
        log.warning("journal_damaged_file_removed path=%s", older)
        _remove(older)
    return aside


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)
