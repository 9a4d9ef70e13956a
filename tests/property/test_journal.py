"""The journal beside a simple model. Daemons change sessions, report to clients, and die at any moment, losing their
memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from djinn_client.protocol import CLASSES, Class
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent, now
from djinnd.server.journal.changes import Reclassified
from djinnd.server.journal.file import NAME, JournalFile
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.edits import Edited, EditsCut, EditsEnded
from djinnd.server.probe_lists.edit_list import EditList
from tests.support.journalled import Session

Told = tuple[list[int], str, EditList]


class JournalMachine(RuleBasedStateMachine):
    """`told` is the state that a client has been told. After each death it must be there, with or without later
    changes."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folders = [Path(tempfile.mkdtemp(prefix="journal-"))]
        self.told: dict[str, Told] = {}
        self.count = 0
        self.start()

    def start(self) -> None:
        async def open_it() -> None:
            self.journal = Journal(str(self.folders[-1]))
            there = self.journal.open()
            kept = {
                session.id: (session.tokens.tolist(), session.priority, there.edits.get(session.id, EditList()))
                for session in there.sessions
            }
            assert kept == self.told
            assert there.edits.keys() <= kept.keys()
            self.sessions = {
                name: Session(name, tokens, priority=priority, journalled=len(tokens), edits=edits)
                for name, (tokens, priority, edits) in kept.items()
            }

        self.loop.run_until_complete(open_it())

    def tell(self) -> None:
        """A client is told the state: the loop runs until it has been."""
        heard: list[dict[str, Told]] = []
        told = {
            name: (list(session.tokens), session.priority, session.edits.copy())
            for name, session in self.sessions.items()
        }
        self.journal.after(heard.append, told)
        self.loop.run_until_complete(self.journal.settled())
        (self.told,) = heard

    def session(self, data: st.DataObject) -> Session:
        return self.sessions[data.draw(st.sampled_from(sorted(self.sessions)))]

    @rule(tokens=st.lists(st.integers(0, 1 << 31), max_size=3))
    def open(self, tokens: list[int]) -> None:
        self.count += 1
        session = self.sessions[f"s{self.count}"] = Session(f"s{self.count}", tokens)
        self.journal.opened(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=5))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        session = self.session(data)
        session.tokens += tokens
        self.journal.changed(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        session = self.session(data)
        length = data.draw(st.integers(0, len(session.tokens)))
        del session.tokens[length:]
        session.journalled = min(session.journalled, length)
        self.journal.changed(session)
        if session.edits.cut(length):
            self.journal.note(EditsCut(session.id, length))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), values=st.binary(max_size=8), first=st.none() | st.integers(0, 20))
    def edit(self, data: st.DataObject, values: bytes, first: int | None) -> None:
        """Edits from now on, or at two positions."""
        session = self.session(data)
        if first is None:
            extents: tuple[Extent, ...] = (Extent(now(len(session.tokens))),)
        else:
            extents = (Extent(first, first + 1), Extent(first + 3, first + 4, 1))
        edit = Edit(session.edits.given + 1, (Point("mlp", 1),), "add", extents, rows=2, values=values)
        session.edits.add(edit, ["blocks.1.mlp.hook_out"])
        self.journal.note(Edited(session.id, edit, ["blocks.1.mlp.hook_out"]))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end_edits(self, data: st.DataObject) -> None:
        session = self.session(data)
        numbers = [number for number in session.edits.unended if data.draw(st.booleans())]
        at = now(len(session.tokens))
        session.edits.end(numbers, at)
        self.journal.note(EditsEnded(session.id, numbers, at))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), priority=st.sampled_from(CLASSES))
    def reclassify(self, data: st.DataObject, priority: Class) -> None:
        session = self.session(data)
        session.priority = priority
        self.journal.note(Reclassified(session.id, priority))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.journal.closed(self.sessions.pop(self.session(data).id).id)

    @rule()
    def turn(self) -> None:
        """Ends the loop's turn; no client is told yet."""
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def hear(self) -> None:
        self.tell()

    @rule()
    def fold(self) -> None:
        """Compacts at a moment at which nothing is being written."""
        self.tell()
        assert isinstance(self.journal._file, JournalFile)
        self.journal._file.fold()

    @rule()
    def die(self) -> None:
        """The next daemon has what the files hold at this moment."""
        self.tell()
        folder = Path(tempfile.mkdtemp(prefix="journal-"))
        for path in self.folders[-1].glob(f"{NAME}*"):
            shutil.copy(path, folder)
        self.loop.run_until_complete(self.journal.close())
        self.folders.append(folder)
        self.start()

    @rule()
    def stop(self) -> None:
        self.tell()
        self.loop.run_until_complete(self.journal.close())
        self.start()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.journal.close())
            self.loop.close()
            for folder in self.folders:
                shutil.rmtree(folder)


class TestJournal(JournalMachine.TestCase):
    settings = settings(max_examples=10, stateful_step_count=30)


@pytest.mark.long
class TestJournalAtLength(JournalMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30)
