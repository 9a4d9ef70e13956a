"""The journal beside a dumb model: daemons that change sessions, tell, and die at any moment by losing their memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from djinn_client.protocol import CLASSES, Class
from djinnd.server.journal import Journal
from djinnd.server.journal_file import NAME, JournalFile
from tests.support.journalled import Session


class JournalMachine(RuleBasedStateMachine):
    """`told` is what a client has heard: after each death it must be there, with what came after it or without."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folders = [Path(tempfile.mkdtemp(prefix="journal-"))]
        self.told: dict[str, tuple[list[int], str]] = {}
        self.count = 0
        self.start()

    def start(self) -> None:
        async def open_it() -> None:
            self.journal = Journal(str(self.folders[-1]))
            kept = {session.id: (session.tokens.tolist(), session.priority) for session in self.journal.open().sessions}
            assert kept == self.told
            self.sessions = {
                name: Session(name, tokens, priority=priority, journalled=len(tokens))
                for name, (tokens, priority) in kept.items()
            }

        self.loop.run_until_complete(open_it())

    def tell(self) -> None:
        """A client hears how things are: the loop runs until it has."""
        heard: list[dict[str, tuple[list[int], str]]] = []
        now = {name: (list(session.tokens), session.priority) for name, session in self.sessions.items()}
        self.journal.after(heard.append, now)
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

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), priority=st.sampled_from(CLASSES))
    def reclassify(self, data: st.DataObject, priority: Class) -> None:
        session = self.session(data)
        session.priority = priority
        self.journal.reclassified(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.journal.closed(self.sessions.pop(self.session(data).id))

    @rule()
    def turn(self) -> None:
        """The loop's turn ends; nobody hears of it yet."""
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def hear(self) -> None:
        self.tell()

    @rule()
    def fold(self) -> None:
        """At a moment at which nothing is being written."""
        self.tell()
        assert isinstance(self.journal._file, JournalFile)
        self.journal._file.fold()

    @rule()
    def die(self) -> None:
        """What the files hold at this moment is what the next daemon has."""
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


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=25, stateful_step_count=30)
