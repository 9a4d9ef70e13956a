"""Messages wait until their changes are written, and keep their order. While the disk takes nothing they do not
wait."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djinn_client.errors import JournalUnavailable
from djinnd.server.journal import journal
from djinnd.server.journal.file import FOLD_BYTES, JournalFile
from djinnd.server.journal.journal import Journal
from tests.support.journalled import Session


class Disk:
    """Wraps JournalFile.append: delays it, and makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None
        self.commits = 0
        self.takes_s = 0.0
        self.by_the_loop: list[bool] = []  # for each attempt: it ran in the loop's thread
        append = JournalFile.append

        def slow(file: JournalFile, changes: list) -> None:
            self.by_the_loop.append(threading.current_thread() is threading.main_thread())
            time.sleep(self.takes_s)
            assert self.free.wait(60)
            if self.error is not None:
                raise self.error
            append(file, changes)
            self.commits += 1

        monkeypatch.setattr(JournalFile, "append", slow)
        monkeypatch.setattr(journal, "RETRY", 0.01)

    async def be_slow_once(self, there: Journal) -> None:
        self.takes_s = 1.5 * journal.SLOW_S
        there.opened(Session("slow"))
        await there.settled()
        self.takes_s, self.commits = 0.0, 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def play(folder: Path, act: Callable[[Journal], Awaitable[None]]) -> dict[str, list[int]]:
    """Runs `act` with a journal, and returns the tokens of the sessions that the next daemon finds."""

    async def first() -> None:
        there = Journal(str(folder))
        there.open()
        try:
            await act(there)
        finally:
            await there.close()

    async def second() -> dict[str, list[int]]:
        there = Journal(str(folder))
        found = {session.id: session.tokens.tolist() for session in there.open().sessions}
        await there.close()
        return found

    asyncio.run(asyncio.wait_for(first(), 60))
    return asyncio.run(second())


def test_messages_wait_until_the_changes_before_them_are_written(tmp_path: Path, disk: Disk) -> None:
    async def act(there: Journal) -> None:
        told: list[object] = []
        there.after(told.append, "at once")
        assert told == ["at once"]
        await disk.be_slow_once(there)
        disk.free.clear()
        session = Session("a")
        there.opened(session)
        there.after(told.append, "opened")
        await asyncio.sleep(0.02)
        session.tokens += [1, 2]
        there.changed(session)
        there.after(told.append, 2)
        session.tokens += [3]
        there.changed(session)
        there.after(told.append, 3)
        await asyncio.sleep(0.02)
        assert (told, disk.commits) == (["at once"], 0)
        disk.free.set()
        await there.settled()
        assert told == ["at once", "opened", 2, 3]
        assert disk.commits == 2, "the changes that came meanwhile are one commit"
        there.after(told.append, "at once again")
        assert told[-1] == "at once again"

    assert play(tmp_path, act) == {"slow": [], "a": [1, 2, 3]}


@pytest.mark.parametrize("is_slow", [False, True])
def test_write_now_writes_at_once_unless_the_disk_is_slow(tmp_path: Path, disk: Disk, is_slow: bool) -> None:
    async def act(there: Journal) -> None:
        told: list[int] = []
        if is_slow:
            await disk.be_slow_once(there)
        session = Session("a")
        for token in range(3):
            if not token:
                there.opened(session)
            session.tokens.append(token)
            there.changed(session)
            there.after(told.append, token)
            assert told == list(range(0 if is_slow else token))
            there.write_now()
            assert told == list(range(0 if is_slow else token + 1))
        there.write_now()
        await there.settled()
        assert told == [0, 1, 2] and disk.commits == (2 if is_slow else 3)

    assert play(tmp_path, act) == {"a": [0, 1, 2]} | ({"slow": []} if is_slow else {})


def test_a_message_without_new_changes_waits_for_the_commit_under_way_only(tmp_path: Path, disk: Disk) -> None:
    async def act(there: Journal) -> None:
        told: list[str] = []
        await disk.be_slow_once(there)
        disk.free.clear()
        session = Session("a")
        there.opened(session)
        await asyncio.sleep(0.02)  # its write is under way
        there.after(told.append, "ping")
        session.tokens.append(1)
        there.changed(session)
        there.after(told.append, "token")
        disk.free.set()
        while not told:
            await asyncio.sleep(0)
        assert told == ["ping"]
        await there.settled()
        assert told == ["ping", "token"]

    assert play(tmp_path, act) == {"slow": [], "a": [1]}


def test_the_loop_writes_unless_the_disk_was_slow_recently(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(there: Journal) -> None:
        told: list[str] = []

        async def note(word: str) -> bool:
            """Returns True if the event loop has written the change by itself."""
            session.tokens.append(len(told))
            there.changed(session)
            there.after(told.append, word)
            await asyncio.sleep(0)
            at_once = told[-1:] == [word]
            await there.settled()
            assert told[-1] == word
            return at_once

        session = Session("a")
        there.opened(session)
        assert await note("quick")
        await disk.be_slow_once(there)
        assert not await note("cautious")
        monkeypatch.setattr(journal, "CAUTIOUS_S", 0.0)
        assert await note("quick again")
        disk.error = OSError(28, "No space left")
        assert not await note("failed")
        disk.error = None
        assert disk.by_the_loop[:5] == [True, True, False, True, True]
        assert not disk.by_the_loop[5], "the thread tries again"

    assert play(tmp_path, act) == {"slow": [], "a": [0, 1, 2, 3]}


def test_the_thread_tidies_and_changes_meanwhile_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, tidied = threading.Event(), []
    tidy = JournalFile.tidy

    def slow(file: JournalFile) -> None:
        assert free.wait(60)
        tidy(file)
        tidied.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(JournalFile, "tidy", slow)

    async def act(there: Journal) -> None:
        told: list[str] = []
        session = Session("a", [0] * FOLD_BYTES)
        there.opened(session)
        there.after(told.append, "long")
        await asyncio.sleep(0.02)
        assert told == ["long"], "the change is written, and the thread tidies"
        session.tokens.append(1)
        there.changed(session)
        there.after(told.append, "meanwhile")
        await asyncio.sleep(0.02)
        assert told == ["long"]
        free.set()
        await there.settled()
        assert told == ["long", "meanwhile"] and tidied == [False]

    assert play(tmp_path, act) == {"a": [0] * FOLD_BYTES + [1]}


def test_a_session_is_cut_and_another_closed_in_one_turn(tmp_path: Path) -> None:
    async def act(there: Journal) -> None:
        cut, closed = Session("cut", [1, 2, 3]), Session("closed", [1])
        there.opened(cut)
        there.opened(closed)
        await there.settled()
        assert cut.journalled == 3
        cut.tokens[1:] = [8]
        cut.journalled = 1
        there.changed(cut)
        closed.tokens.append(2)
        there.changed(closed)
        there.closed(closed.id)

    assert play(tmp_path, act) == {"cut": [1, 8]}


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left")])
def test_a_disk_that_accepts_no_writes(tmp_path: Path, disk: Disk, error: Exception) -> None:

    async def act(there: Journal) -> None:
        told: list[int] = []
        session = Session("a", [1])
        there.opened(session)
        await there.settled()
        there.expect_writable()
        disk.error = error
        for token in (2, 3):
            session.tokens.append(token)
            there.changed(session)
            there.after(told.append, token)
            await there.settled()
        assert told == [2, 3], "requests under way continue"
        with pytest.raises(JournalUnavailable, match=r"cannot be written .*journal\.db: .*(full|No space)") as refused:
            there.expect_writable()
        assert refused.value.data["path"] == str(tmp_path / "journal.db")
        disk.error = None
        async with asyncio.timeout(60):
            while True:
                try:
                    there.expect_writable()
                    break
                except JournalUnavailable:
                    await asyncio.sleep(0.005)

    assert play(tmp_path, act) == {"a": [1, 2, 3]}, "failed writes are tried again"


def test_changes_that_could_not_be_written_are_tried_again_at_the_end(tmp_path: Path, disk: Disk) -> None:
    async def act(there: Journal) -> None:
        disk.error = OSError(28, "No space left")
        there.opened(Session("a", [1]))
        await there.settled()
        disk.error = None

    assert play(tmp_path, act) == {"a": [1]}


def test_a_journal_that_is_not_open_holds_nothing_back() -> None:
    there, told = Journal("/nowhere"), []
    session = Session("a")
    there.opened(session)
    session.tokens.append(1)
    there.changed(session)
    there.closed(session.id)
    there.after(told.append, 1)
    assert told == [1]
    there.expect_writable()
