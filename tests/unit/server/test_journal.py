"""Nobody is told before it is written, everybody in order, and of a disk that takes nothing everybody at once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djinn_client.errors import JournalUnavailable
from djinnd.server import journal
from djinnd.server.journal import Journal
from djinnd.server.journal_file import FOLD_BYTES, JournalFile
from tests.support.journalled import Session


class Disk:
    """Stands before JournalFile.append: holds it up, and lets it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None
        self.commits = 0
        self.takes_s = 0.0
        self.by_the_loop: list[bool] = []  # each attempt: it was the loop's thread
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
    """What a daemon has left, and the next one finds."""

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


def test_what_happens_is_written_and_what_depends_on_it_is_told_after_that(tmp_path: Path, disk: Disk) -> None:
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
        assert disk.commits == 2, "what came meanwhile is one commit"
        there.after(told.append, "at once again")
        assert told[-1] == "at once again"

    assert play(tmp_path, act) == {"slow": [], "a": [1, 2, 3]}


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_written_now_is_told_now_unless_the_disk_is_slow(tmp_path: Path, disk: Disk, is_slow: bool) -> None:
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


def test_what_depends_on_nothing_new_waits_for_the_commit_before_it_only(tmp_path: Path, disk: Disk) -> None:
    async def act(there: Journal) -> None:
        told: list[str] = []
        await disk.be_slow_once(there)
        disk.free.clear()
        session = Session("a")
        there.opened(session)
        await asyncio.sleep(0.02)  # it is being written
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


def test_the_loop_writes_unless_the_disk_has_been_slow_of_late(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(there: Journal) -> None:
        told: list[str] = []

        async def note(word: str) -> bool:
            """→ whether the loop has written it by itself."""
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
        monkeypatch.setattr(there, "_cautious_until", 0.0)
        assert await note("quick again")
        disk.error = OSError(28, "No space left")
        assert not await note("failed")
        disk.error = None
        assert disk.by_the_loop[:5] == [True, True, False, True, True]
        assert not disk.by_the_loop[5], "the thread has tried again"

    assert play(tmp_path, act) == {"slow": [], "a": [0, 1, 2, 3]}


def test_tidying_is_the_thread_s_and_what_happens_meanwhile_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert told == ["long"], "it is written, and the thread tidies"
        session.tokens.append(1)
        there.changed(session)
        there.after(told.append, "meanwhile")
        await asyncio.sleep(0.02)
        assert told == ["long"]
        free.set()
        await there.settled()
        assert told == ["long", "meanwhile"] and tidied == [False]

    assert play(tmp_path, act) == {"a": [0] * FOLD_BYTES + [1]}


def test_cut_and_closed_in_one_turn_with_what_was_before(tmp_path: Path) -> None:
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
        there.closed(closed)

    assert play(tmp_path, act) == {"cut": [1, 8]}


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left")])
def test_a_disk_that_takes_nothing(tmp_path: Path, disk: Disk, error: Exception) -> None:

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
        assert told == [2, 3], "what runs goes on"
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

    assert play(tmp_path, act) == {"a": [1, 2, 3]}, "what could not be written was tried again"


def test_what_cannot_be_written_at_the_end_is_tried_once_more(tmp_path: Path, disk: Disk) -> None:
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
    there.closed(session)
    there.after(told.append, 1)
    assert told == [1]
    there.expect_writable()
