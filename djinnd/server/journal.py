"""The journal as the event loop sees it: what happens to sessions is written before anybody is told of it.

    changed ─► gathering ──end of the loop's turn──► written ──committed──► what was held is told
                   ▲                                    │
                   └── while one group is written, the next gathers, with what depends on it

Whoever tells a client something does so by `after`: at once where all that has happened so far is committed, else when
it is. That holds for every word, not only for those that depend on a change, so the order stays. A turn of the loop
makes one commit, and while the disk is slow several turns do.

The loop writes by itself, which is a copy to the page cache: a thread would take ten times as long to wake up, twice.
The thread has what waits for the disk: tidying, and for some time every commit, after one that was slow or failed.

Where a commit fails (a full disk), nothing is held back any more: what runs goes on, new work is refused
(`expect_writable`), and what could not be written is tried again until it can.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from djinn_client.breakpoints import HitInfo
from djinn_client.errors import JournalUnavailable
from djinn_client.protocol import Class
from djinnd.core.edits import Edit
from djinnd.server.breakpoint_list import Breakpoint, BreakpointList
from djinnd.server.edit_list import PART_BYTES, EditList, nbytes_of
from djinnd.server.journal_breakpoints import BreakpointsEnded, Broken, Stopped
from djinnd.server.journal_changes import Change, Closed, Extended, Opened, Published, Reclassified, Withdrawn
from djinnd.server.journal_conversations import Conversed
from djinnd.server.journal_edits import Edited, EditsCut, EditsEnded
from djinnd.server.journal_file import JournalFile, KeptSession
from djinnd.server.journal_records import Recorded, Unrecorded
from djinnd.server.journal_space import COPIES
from djinnd.server.stopping import leave_signals_to_the_loop

log = logging.getLogger("djinnd.server")

RETRY = 1.0  # seconds between attempts to write what could not be written
SLOW_S = 0.02  # a commit that takes the loop longer
CAUTIOUS_S = 10.0  # for so long after one, the thread writes
SHORT_S = 5.0  # that the file is kept small, at least
LOOK_EVERY_S = 0.05  # at the disk's free space, where little is to be written
MUCH = 64 << 10  # bytes; more are never written without a look


class Journalled(Protocol):
    """What a session has of the journal's: its first `journalled` tokens are written, or about to be."""

    id: str
    user: int
    model: str
    shared: bool
    priority: Class
    created: float  # CLOCK_MONOTONIC
    tokens: list[int]
    journalled: int


class Kept(NamedTuple):
    """What earlier daemons have left."""

    sessions: list[KeptSession]
    prefixes: list[Published]
    edits: dict[str, EditList]  # by session
    breakpoints: dict[str, BreakpointList]  # likewise
    conversations: dict[str, Conversed]  # likewise
    records: list[Recorded]
    now: float  # the journal's time, as in `sessions`


@dataclass(slots=True)
class _Group:
    """What goes into one commit, and what waits for it."""

    changes: list[Change] = field(default_factory=list)
    sessions: dict[str, Journalled] = field(default_factory=dict)  # whose tokens have changed
    held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    nbytes: int = 0  # of the large changes

    @property
    def is_empty(self) -> bool:
        return not self.changes and not self.sessions


class Journal:
    """Before `open` and after `close` nothing is written, and nothing held."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: JournalFile | None = None
        self._thread: threading.Thread | None = None
        self._groups: queue.SimpleQueue[list[Change] | None] = queue.SimpleQueue()
        self._gathering = _Group()
        self._writing: _Group | None = None
        self._due = False  # the end of the turn is to write
        self._cautious_until = 0.0
        self._settled = asyncio.Event()
        self._settled.set()
        self._fault = ""  # why the last commit failed
        self._free, self._looked_at = 1 << 62, -math.inf
        self._short_until = -math.inf

    def open(self) -> Kept:
        """Raises StartError."""
        self._loop = asyncio.get_running_loop()
        self._file = JournalFile(self._folder)
        file = self._file
        parts = (file.edits(), file.breakpoints(), file.conversations(), file.records())
        kept = Kept(file.sessions(), file.prefixes(), *parts, file.clock.now())
        self._thread = threading.Thread(target=self._write, args=(self._file,), name="journal", daemon=True)
        self._thread.start()
        log.info("journal_opened path=%s sessions=%d", self._file.path, len(kept.sessions))
        return kept

    async def settled(self) -> None:
        """Returns when nothing is held and all is written, or has been tried."""
        await self._settled.wait()

    async def close(self) -> None:
        """When nothing more happens to sessions. Does nothing where it is not open."""
        if self._thread is None or self._file is None:
            return
        await self.settled()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)
        with suppress(sqlite3.Error, ValueError):  # the next daemon has it from the changes
            await asyncio.to_thread(self._file.leave)
        self._file.close()
        self._thread = self._file = None

    @property
    def notes(self) -> list[str]:
        """What an administrator should know."""
        files = [] if self._file is None else self._file.damaged_files
        return [
            f"the journal was damaged; it is kept as {path}: remove that when it is of no use any more"
            for path in files
        ]

    # --- what happens to sessions -----------------------------------------------------------------------------------

    def expect_writable(self) -> None:
        """Raises JournalUnavailable while what happens cannot be written."""
        if self._fault:
            assert self._file is not None
            raise JournalUnavailable(
                f"sessions cannot be kept in {self._file.path}: {self._fault}; nothing new begins until they can: make "
                "room on that disk, and try again",
                path=str(self._file.path),
            )

    def free(self, nbytes: int = 0) -> int:
        """Bytes of room for copies (journal_space.py), where so many bytes are about to be written."""
        now = time.monotonic()
        if self._file is not None and (nbytes > MUCH or now - self._looked_at > LOOK_EVERY_S):
            self._free, self._looked_at = self._file.free_bytes, now
        gathered = self._gathering.nbytes + (self._writing.nbytes if self._writing is not None else 0)
        return max(0, self._free - COPIES * gathered)

    def keep_small(self, free: int, reserve: int) -> None:
        """While less than the reserve is free, and for some time, the file is kept small at the cost of time."""
        file = self._file
        is_short = free < reserve or time.monotonic() < self._short_until
        if file is None or file.is_short == is_short:
            return
        file.is_short = is_short
        self._short_until = time.monotonic() + SHORT_S if is_short else -math.inf
        event = "journal_short path=%s free=%d" if is_short else "journal_has_room path=%s free=%d"
        log.warning(event, file.path, free)
        if self._writing is None and file.wants_tidying:
            self._tidy()

    def freed(self, nbytes: int) -> None:
        """So much of a session's is gone by what was just noted."""
        if self._file is not None:
            self._file.freed(nbytes)
            self._looked_at = -math.inf

    def opened(self, session: Journalled) -> None:
        if self._file is None:
            return
        created = self._file.clock.at(session.created)
        self._note(Opened(session.id, session.user, session.model, session.shared, session.priority, created))
        if session.tokens:
            self.changed(session)

    def changed(self, session: Journalled) -> None:
        """Its tokens from `journalled` on are new, or what was behind that is gone."""
        if self._thread is not None:
            self._gathering.sessions[session.id] = session
            self._write_soon()

    def reclassified(self, session: Journalled) -> None:
        self._note(Reclassified(session.id, session.priority))

    def conversed(self, session: str, key: str, prompt: int) -> None:
        self._note(Conversed(session, key, prompt))

    def recorded(self, record: Recorded) -> None:
        if self._thread is not None:
            self._gathering.nbytes += len(record.tokens) + len(record.body)
        self._note(record)

    def unrecorded(self, record: Recorded) -> None:
        self._note(Unrecorded(record.user, record.record))

    def edited(self, session: str, edit: Edit, names: Sequence[str]) -> None:
        if self._thread is not None:
            self._gathering.nbytes += nbytes_of(edit, names)
        self._note(Edited(session, edit, names))

    def edits_ended(self, session: str, numbers: Collection[int], at: int) -> None:
        self._note(EditsEnded(session, list(numbers), at))

    def edits_cut(self, session: str, length: int) -> None:
        self._note(EditsCut(session, length))

    def broken(self, session: str, breakpoint: Breakpoint) -> None:
        if self._thread is not None:
            self._gathering.nbytes += PART_BYTES * breakpoint.count
        self._note(Broken(session, breakpoint))

    def breakpoints_ended(self, session: str, numbers: Collection[int]) -> None:
        self._note(BreakpointsEnded(session, list(numbers)))

    def stopped(self, session: str, hit: HitInfo | None) -> None:
        self._note(Stopped(session, hit))

    def closed(self, session: Journalled) -> None:
        self._gathering.sessions.pop(session.id, None)
        self._note(Closed(session.id))

    def published(self, prefix: Published) -> None:
        self._note(prefix)

    def withdrawn(self, prefix: str) -> None:
        self._note(Withdrawn(prefix))

    def after(self, act: Callable[..., None], *arguments: Any) -> None:
        """Calls it when all that has happened until now is written: at once, or in a later turn of the loop."""
        if not self._gathering.is_empty:
            self._gathering.held.append((act, arguments))
        elif self._writing is not None:
            self._writing.held.append((act, arguments))
        else:
            act(*arguments)

    def write_now(self) -> None:
        """What has happened so far, and not when this turn's work is gathered; unless the disk is slow."""
        if self._thread is not None and self._writing is None:
            self._write_gathered()

    def _note(self, change: Change) -> None:
        if self._thread is not None:
            self._gathering.changes.append(change)
            self._write_soon()

    # --- on its way to the disk -------------------------------------------------------------------------------------

    def _write_soon(self) -> None:
        """When this turn's work is gathered."""
        self._settled.clear()
        if not self._due and self._writing is None:
            self._due = True
            self._loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._due = False
        group = self._gathering
        if self._writing is not None:
            return  # this comes when that is written
        if group.is_empty:
            self._settled.set()
            return
        self._writing, self._gathering = group, _Group()
        for session in group.sessions.values():
            group.changes.append(Extended(session.id, session.journalled, session.tokens[session.journalled :]))
            session.journalled = len(session.tokens)
        if self._wrote_at_once(group.changes):
            self._written()
        else:
            self._groups.put(group.changes)

    def _wrote_at_once(self, changes: list[Change]) -> bool:
        """False: the thread is to write them. It has nothing in hand: nothing is being written."""
        assert self._file is not None
        began = time.monotonic()
        if self._fault or began < self._cautious_until:
            return False
        try:
            self._file.append(changes)
        except Exception:  # the thread finds it, too, and says so
            return False
        ended = time.monotonic()
        if ended - began > SLOW_S:
            self._cautious_until = ended + CAUTIOUS_S
        return True

    def _written(self) -> None:
        assert self._writing is not None and self._file is not None
        held, self._writing = self._writing.held, None
        for act, arguments in held:
            act(*arguments)
        if self._file.wants_tidying:
            self._tidy()
        elif not self._due:
            self._write_gathered()

    def _tidy(self) -> None:
        """By the thread. It has nothing in hand."""
        self._settled.clear()
        self._writing = _Group()
        self._groups.put([])

    def _attempted(self, fault: str) -> None:
        if fault and not self._fault:
            log.error("journal_failed path=%s error=%s", self._file and self._file.path, fault)
        elif self._fault and not fault:
            log.info("journal_recovered path=%s", self._file and self._file.path)
        self._fault = fault

    # --- the thread -------------------------------------------------------------------------------------------------

    def _write(self, file: JournalFile) -> None:
        """What cannot be written stays in order, before what comes later."""
        leave_signals_to_the_loop()
        unwritten: list[Change] = []
        failed = False
        while True:
            try:
                changes, is_retry = self._groups.get(timeout=RETRY if failed else None), False
            except queue.Empty:
                changes, is_retry = [], True
            unwritten += changes or []
            fault = _commit(file, unwritten)
            if not fault:
                unwritten = []
            if fault or failed:
                self._loop.call_soon_threadsafe(self._attempted, fault)
            failed = bool(fault)
            if changes is None:
                return
            if not is_retry:
                self._loop.call_soon_threadsafe(self._written)


def _commit(file: JournalFile, changes: list[Change]) -> str:
    """Why it failed, or nothing. Tidies, too."""
    if changes:
        try:
            file.append(changes)
        except Exception as error:  # whatever it is: nobody may wait for this thread for ever
            with suppress(sqlite3.Error):
                file.empty_log()  # the next attempt may find room there
            return str(error)
    if file.wants_tidying:
        try:
            file.tidy()
        except Exception as error:  # nothing is lost: the changes are there
            log.warning("journal_not_tidied path=%s error=%s", file.path, error)
    return ""
