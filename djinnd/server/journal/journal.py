"""The journal as the event loop sees it. Changes of sessions are written before clients are told of them.

    changed ─► gathering ──end of the loop's turn──► written ──committed──► held messages are sent
                   ▲                                    │
                   └── while one group is written, the next gathers, with the messages that wait for it

All messages to clients go through `after`: it sends at once if all changes so far are committed, else when they are.
That holds for all messages and not only for those that depend on a change, so their order stays. A turn of the loop
makes one commit; while the disk is slow, several turns share one.

The event loop writes by itself, which is a copy to the page cache. A thread would take ten times as long, to wake up
twice. The thread does the work that waits for the disk: tidying, and, for some time after a slow or failed commit, each
commit.

While commits fail (a full disk), messages are not held back: requests under way go on, new work is refused
(`expect_writable`), and the writes are tried again until they succeed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from djinn_client.errors import JournalUnavailable
from djinn_client.protocol import Class
from djinnd.server.handover.stopping import leave_signals_to_the_loop
from djinnd.server.journal.changes import Change, Closed, Extended, SessionAdded
from djinnd.server.journal.file import JournalContent, JournalFile
from djinnd.server.journal.space import COPIES

log = logging.getLogger("djinnd.server")

RETRY = 1.0  # seconds between attempts to write changes that could not be written
SLOW_S = 0.02  # seconds: a commit on the event loop that takes longer is slow
CAUTIOUS_S = 10.0  # seconds after a slow commit in which the thread writes
SHORT_S = 5.0  # seconds for which the file is kept small, at least
LOOK_EVERY_S = 0.05  # seconds between checks of the disk's free space, for small writes
MUCH = 64 << 10  # bytes: a larger write always checks the free space


class Journalled(Protocol):
    """A session as the journal needs it. The first `journalled` of its tokens are written, or being written."""

    id: str
    user: int
    model: str
    shared: bool
    priority: Class
    created: float  # CLOCK_MONOTONIC
    tokens: list[int]
    journalled: int


@dataclass(slots=True)
class _Group:
    """The changes of one commit, and the messages that wait for it."""

    changes: list[Change] = field(default_factory=list)
    sessions: dict[str, Journalled] = field(default_factory=dict)  # with changed tokens
    held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    nbytes: int = 0  # of the large changes

    @property
    def is_empty(self) -> bool:
        return not self.changes and not self.sessions


class Journal:
    """Collects changes, commits them and holds messages back. Before `open` and after `close` it writes and holds
    nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: JournalFile | None = None
        self._thread: threading.Thread | None = None
        self._groups: queue.SimpleQueue[list[Change] | None] = queue.SimpleQueue()
        self._gathering = _Group()
        self._writing: _Group | None = None
        self._due = False  # a write is scheduled for the end of this turn
        self._slow_at = -math.inf  # time of the last slow commit
        self._settled = asyncio.Event()
        self._settled.set()
        self._fault = ""  # why the last commit failed; empty if it did not
        self._free, self._looked_at = 1 << 62, -math.inf
        self._short_until = -math.inf

    def open(self) -> JournalContent:
        """Opens the journal's file and returns its content. Raises StartError."""
        self._loop = asyncio.get_running_loop()
        self._file = JournalFile(self._folder)
        kept = self._file.content()
        self._thread = threading.Thread(target=self._write, args=(self._file,), name="journal", daemon=True)
        self._thread.start()
        log.info("journal_opened path=%s sessions=%d", self._file.path, len(kept.sessions))
        return kept

    async def settled(self) -> None:
        """Returns when no message is held and all changes were written, or their write has failed."""
        await self._settled.wait()

    async def close(self) -> None:
        """Writes the rest and closes the file. Called when sessions no longer change. Does nothing if it is not
        open."""
        if self._thread is None or self._file is None:
            return
        await self.settled()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)
        with suppress(sqlite3.Error, ValueError):  # else the next daemon reads the unfolded changes
            await asyncio.to_thread(self._file.leave)
        self._file.close()
        self._thread = self._file = None

    @property
    def notes(self) -> list[str]:
        """Messages for an administrator: damaged files that were set aside."""
        files = [] if self._file is None else self._file.damaged_files
        return [
            f"the journal was damaged; the old file is kept as {path}: remove it when you no longer need it"
            for path in files
        ]

    # --- changes of sessions ------------------------------------------------------------------------------------------

    def expect_writable(self) -> None:
        """Raises JournalUnavailable while changes cannot be written."""
        if self._fault:
            assert self._file is not None
            raise JournalUnavailable(
                f"sessions cannot be written to {self._file.path}: {self._fault}; no new work is accepted: make "
                "room on that disk, and try again",
                path=str(self._file.path),
            )

    def free(self, nbytes: int = 0) -> int:
        """Bytes on the disk that are free for journal data and its copies (space.py), after pending writes.
        `nbytes`: the size of the caller's next write."""
        now = time.monotonic()
        if self._file is not None and (nbytes > MUCH or now - self._looked_at > LOOK_EVERY_S):
            self._free, self._looked_at = self._file.free_bytes, now
        gathered = self._gathering.nbytes + (self._writing.nbytes if self._writing is not None else 0)
        return max(0, self._free - COPIES * gathered)

    def keep_small(self, free: int, reserve: int) -> None:
        """Switches the file to a small size, at the cost of time, while less than the reserve is free, and for
        at least SHORT_S."""
        file = self._file
        is_short = free < reserve or time.monotonic() < self._short_until
        if file is None or file.is_short == is_short:
            return
        file.is_short = is_short
        self._short_until = time.monotonic() + SHORT_S if is_short else -math.inf
        event = "journal_short path=%s free=%d" if is_short else "journal_has_room path=%s free=%d"
        log.warning(event, file.path, free)
        if self._writing is None and file.needs_tidying:
            self._tidy()

    def freed(self, nbytes: int) -> None:
        """Notes that the last change has freed `nbytes` of a session."""
        if self._file is not None:
            self._file.freed(nbytes)
            self._looked_at = -math.inf

    def opened(self, session: Journalled) -> None:
        if self._file is None:
            return
        created = self._file.clock.at(session.created)
        self.note(SessionAdded(session.id, session.user, session.model, session.shared, session.priority, created))
        if session.tokens:
            self.changed(session)

    def changed(self, session: Journalled) -> None:
        """Notes that tokens from `journalled` on are new, or were cut."""
        if self._thread is not None:
            self._gathering.sessions[session.id] = session
            self._write_soon()

    def closed(self, session: str) -> None:
        self._gathering.sessions.pop(session, None)
        self.note(Closed(session))

    def note(self, change: Change, nbytes: int = 0) -> None:
        """Takes a change, to be written at the end of this turn of the loop. `nbytes`: its size, if it may be large."""
        if self._thread is not None:
            self._gathering.changes.append(change)
            self._gathering.nbytes += nbytes
            self._write_soon()

    def after(self, act: Callable[..., None], *arguments: Any) -> None:
        """Calls `act` when all changes so far are written: at once, or in a later turn of the loop."""
        if not self._gathering.is_empty:
            self._gathering.held.append((act, arguments))
        elif self._writing is not None:
            self._writing.held.append((act, arguments))
        else:
            act(*arguments)

    def write_now(self) -> None:
        """Writes the changes so far without waiting for the end of this turn, unless a write is under way."""
        if self._thread is not None and self._writing is None:
            self._write_gathered()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_soon(self) -> None:
        """Schedules a write for the end of this turn of the loop."""
        self._settled.clear()
        if not self._due and self._writing is None:
            self._due = True
            self._loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._due = False
        group = self._gathering
        if self._writing is not None:
            return  # called again when that write is done
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
        """Writes the changes on the event loop. Returns False if the thread has to write them. The thread is idle,
        because no other group is being written."""
        assert self._file is not None
        began = time.monotonic()
        if self._fault or began < self._slow_at + CAUTIOUS_S:
            return False
        try:
            self._file.append(changes)
        except Exception:  # the thread will meet it too, and report it
            return False
        ended = time.monotonic()
        if ended - began > SLOW_S:
            self._slow_at = ended
        return True

    def _written(self) -> None:
        assert self._writing is not None and self._file is not None
        held, self._writing = self._writing.held, None
        for act, arguments in held:
            act(*arguments)
        if self._file.needs_tidying:
            self._tidy()
        elif not self._due:
            self._write_gathered()

    def _tidy(self) -> None:
        """Lets the idle thread tidy the file."""
        self._settled.clear()
        self._writing = _Group()
        self._groups.put([])

    def _note_result(self, fault: str) -> None:
        if fault and not self._fault:
            log.error("journal_failed path=%s error=%s", self._file and self._file.path, fault)
        elif self._fault and not fault:
            log.info("journal_recovered path=%s", self._file and self._file.path)
        self._fault = fault

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _write(self, file: JournalFile) -> None:
        """Runs the thread. Changes that cannot be written stay in order, before later ones."""
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
                self._loop.call_soon_threadsafe(self._note_result, fault)
            failed = bool(fault)
            if changes is None:
                return
            if not is_retry:
                self._loop.call_soon_threadsafe(self._written)


def _commit(file: JournalFile, changes: list[Change]) -> str:
    """Appends the changes and tidies the file. Returns why it failed, or an empty string."""
    if changes:
        try:
            file.append(changes)
        except Exception as error:  # any error: clients wait for this thread
            with suppress(sqlite3.Error):
                file.empty_log()  # may free room for the next attempt
            return str(error)
    if file.needs_tidying:
        try:
            file.tidy()
        except Exception as error:  # no data is lost: the changes are in the log
            log.warning("journal_not_tidied path=%s error=%s", file.path, error)
    return ""
