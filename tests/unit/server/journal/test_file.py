"""The journal's file alone: committed changes are read back, in whatever state a daemon has left the file. An unusable
file stays as it is."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest

from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import FOREVER, Edit, Extent
from djinnd.server.handover.socket_path import StartError
from djinnd.server.journal import database as journal_database
from djinnd.server.journal import file as journal_file
from djinnd.server.journal.changes import Change, Closed, Extended, Reclassified, SessionAdded
from djinnd.server.journal.file import NAME, JournalFile
from djinnd.server.journal.tables.breakpoints import BreakpointsEnded, BreakpointSet, Stopped
from djinnd.server.journal.tables.conversations import ConversationKept
from djinnd.server.journal.tables.edits import Edited, EditsCut, EditsEnded
from djinnd.server.journal.tables.prefixes import Published, Withdrawn
from djinnd.server.journal.tables.records import Recorded, Unrecorded
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, SessionBreakpoint

ONE = SessionAdded("one", 1000, "llama", False, "agent", 5.0)
TWO = SessionAdded("two", 1001, "mine", True, "batch", 6.0)
SYSTEM = Published("p1", "llama", 0, 7.5, [1, 2, 3, (1 << 31) - 1])
TOOLS = Published("p2", "qwen", 1000, 8.0, list(range(1000)))


def kept(folder: Path) -> dict[str, list[int]]:
    file = JournalFile(str(folder))
    try:
        return {session.id: session.tokens.tolist() for session in file.content().sessions}
    finally:
        file.close()


def write(folder: Path, *commits: list[Change]) -> None:
    file = JournalFile(str(folder))
    for changes in commits:
        file.append(changes)
    file.close()


def test_committed_changes_are_read_back(tmp_path: Path) -> None:
    write(tmp_path, [ONE, Extended("one", 0, [1, 2, 3])], [TWO, Extended("one", 3, [4])], [Extended("one", 2, [7])])
    file = JournalFile(str(tmp_path))
    one, two = file.content().sessions
    assert one.tokens.tolist() == [1, 2, 7] and two.tokens.tolist() == []
    assert (two.id, two.user, two.model, two.shared, two.priority, two.created) == (
        "two",
        1001,
        "mine",
        True,
        "batch",
        6,
    )
    assert one.used > two.created and not one.shared
    file.close()


def classes(folder: Path) -> dict[str, str]:
    file = JournalFile(str(folder))
    try:
        return {session.id: session.priority for session in file.content().sessions}
    finally:
        file.close()


def test_a_changed_class_is_kept(tmp_path: Path) -> None:
    write(tmp_path, [ONE, TWO, Reclassified("one", "batch")], [Reclassified("one", "interactive")])
    assert classes(tmp_path) == {"one": "interactive", "two": "batch"}
    write(
        tmp_path, [Reclassified("two", "agent"), Extended("two", 0, [1])], [Closed("one"), Reclassified("one", "batch")]
    )
    assert classes(tmp_path) == {"two": "agent"}, "a closed session has no class"


def test_a_cut_session_and_a_closed_one(tmp_path: Path) -> None:
    write(tmp_path, [ONE, TWO, Extended("one", 0, [1, 2, 3]), Extended("two", 0, [9])])
    assert kept(tmp_path) == {"one": [1, 2, 3], "two": [9]}
    write(tmp_path, [Extended("one", 1, []), Closed("two")], [Extended("two", 1, [5])])
    assert kept(tmp_path) == {"one": [1]}, "a token after the close is ignored"


def test_folding_changes_no_session_and_happens_by_itself(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path))
    file.append([ONE])
    for start in range(0, 600, 3):
        file.append([Extended("one", start, [start, start + 1, start + 2])])
        if start % 60 == 0:
            file.fold()
            (session,) = file.content().sessions
            assert session.tokens.tolist() == list(range(start + 3))
    assert not file.needs_tidying
    file.append([Extended("one", 600, [1 << 20] * journal_file.FOLD_BYTES)])
    assert file.needs_tidying
    file.tidy()
    assert not file.needs_tidying
    file.close()
    assert len(kept(tmp_path)["one"]) == 600 + journal_file.FOLD_BYTES


def test_a_long_log_is_copied_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "LOG_BYTES", 1 << 18)
    file = JournalFile(str(tmp_path))
    log = tmp_path / f"{NAME}-wal"
    file.append([ONE])
    commits = 0
    while not file.needs_tidying:
        file.append([Extended("one", commits, [commits])])
        commits += 1
    assert log.stat().st_size >= 1 << 18
    file.tidy()
    assert (log.stat().st_size, file.needs_tidying) == (0, False)
    file.append([Extended("one", commits, [commits])])
    file.close()
    assert kept(tmp_path) == {"one": list(range(commits + 1))}


def test_public_prefixes_are_kept_until_they_are_withdrawn(tmp_path: Path) -> None:
    write(tmp_path, [ONE, SYSTEM], [TOOLS, Extended("one", 0, [5])])
    file = JournalFile(str(tmp_path))
    assert file.content().prefixes == [SYSTEM, TOOLS]
    file.append([Withdrawn("p1"), Withdrawn("nobody's")])
    file.append([msgspec.structs.replace(SYSTEM, prefix="p3", created=9.0)])
    file.append([Withdrawn("p3")])
    file.fold()
    assert file.content().prefixes == [TOOLS]
    file.close()
    write(tmp_path, [Withdrawn("p2")])
    assert kept(tmp_path) == {"one": [5]}
    file = JournalFile(str(tmp_path))
    assert file.content().prefixes == []
    file.close()


def make_older(folder: Path, version: int, *lacking: str) -> None:
    """Makes the file look as an older version, with fewer tables, has left it."""
    with sqlite3.connect(folder / NAME) as db:
        tables = {"change", "session", "prefix", "edit", "edit_count", "breakpoint"}.difference(lacking)
        for table in tables:
            db.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
        db.execute("ALTER TABLE session DROP COLUMN parts")
        db.executescript(
            "".join(f"DROP TABLE {table};" for table in ("mark", "conversation", "record", "adapter", *lacking))
        )
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


def test_a_journal_of_version_1_is_read_and_written(tmp_path: Path) -> None:
    """A djinnd without public prefixes has left it."""
    write(tmp_path, [ONE, Extended("one", 0, [1, 2])], [Extended("one", 2, [3])])
    make_older(tmp_path, 1, "prefix", "edit", "edit_count", "breakpoint")
    for _ in range(2):
        file = JournalFile(str(tmp_path))
        assert [session.tokens.tolist() for session in file.content().sessions] == [[1, 2, 3]]
        file.append([SYSTEM])
        file.close()
    with sqlite3.connect(tmp_path / NAME) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (journal_database.VERSION,)
    db.close()
    file = JournalFile(str(tmp_path))
    assert file.content().prefixes == [SYSTEM]
    file.close()


def added(session: str, number: int, *extents: Extent, values: bytes = b"") -> Edited:
    edit = Edit(number, (Point("resid", 3),), "add", extents, rows=len(values) // 4, values=values)
    return Edited(session, edit, [f"blocks.{number}"])


def spans(folder: Path) -> dict[str, dict[int, list[tuple[int, int]]]]:
    file = JournalFile(str(folder))
    try:
        return {
            name: {edit.number: [(each.start, each.end) for each in edit.extents] for edit in edits.edits}
            for name, edits in file.content().edits.items()
        }
    finally:
        file.close()


def test_edits_are_read_back(tmp_path: Path) -> None:
    one = added("one", 1, Extent(3, 5, 0), Extent(9, 10, 2), values=bytes(range(12)))
    two = added("one", 2, Extent(7))
    write(tmp_path, [ONE, one], [two, TWO])
    for _ in range(2):
        file = JournalFile(str(tmp_path))
        (edits,) = file.content().edits.values()
        assert edits.edits == (one.edit, two.edit)
        assert edits.names == {1: ["blocks.1"], 2: ["blocks.2"]} and edits.given == 2
        file.close()


@pytest.mark.parametrize("folds", [False, True])
def test_changes_of_edits_are_replayed_in_their_own_order(tmp_path: Path, folds: bool) -> None:
    """The order does not depend on the tokens, which are written with the last of several changes."""
    file = JournalFile(str(tmp_path))
    for changes in (
        [ONE, TWO, added("one", 1, Extent(5)), added("two", 1, Extent(0))],
        [added("one", 2, Extent(2, 4), Extent(8, 9)), Extended("one", 0, [7] * 6)],
        [EditsCut("one", 3), EditsEnded("one", [1], 12), added("one", 3, Extent(12)), Extended("one", 3, [8] * 10)],
        [EditsEnded("one", [3], 12), EditsEnded("two", [1], 0), Extended("one", 4, [])],
    ):
        file.append(changes)
        if folds:
            file.fold()
    file.close()
    assert spans(tmp_path) == {"one": {1: [(3, 12)], 2: [(2, 4), (8, 9)]}, "two": {}}
    file = JournalFile(str(tmp_path))
    assert {name: edits.given for name, edits in file.content().edits.items()} == {"one": 3, "two": 1}
    file.close()


def test_edits_go_with_their_session(tmp_path: Path) -> None:
    write(tmp_path, [ONE, TWO, added("one", 1, Extent(0)), added("two", 1, Extent(0))], [Closed("one")])
    write(tmp_path, [added("one", 2, Extent(0)), EditsCut("one", 0), EditsEnded("one", [1], 0)])
    assert spans(tmp_path) == {"two": {1: [(0, FOREVER)]}}
    write(tmp_path, [Closed("two")])
    assert spans(tmp_path) == {}
    with sqlite3.connect(tmp_path / NAME) as db:
        for table in ("edit", "edit_count"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    db.close()


def test_values_of_edits_count_towards_the_next_fold(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path))
    file.append([ONE, added("one", 1, Extent(0), values=bytes(journal_file.FOLD_BYTES))])
    assert file.needs_tidying
    file.fold()
    (edits,) = file.content().edits.values()
    assert len(edits.edits[0].values) == journal_file.FOLD_BYTES
    file.close()


@pytest.mark.parametrize(("version", "lacking"), [(1, ["prefix"]), (2, []), (3, [])])
def test_a_journal_without_edits_is_read_and_written(tmp_path: Path, version: int, lacking: list[str]) -> None:
    write(tmp_path, [ONE, Extended("one", 0, [1, 2])])
    make_older(tmp_path, version, *lacking, "edit", "edit_count", "breakpoint")
    write(tmp_path, [added("one", 1, Extent(1))])
    assert spans(tmp_path) == {"one": {1: [(1, FOREVER)]}}
    assert kept(tmp_path) == {"one": [1, 2]}


@pytest.mark.parametrize("folds", [False, True])
def test_breakpoints_and_hits_are_read_back_and_go_with_their_session(tmp_path: Path, folds: bool) -> None:
    one, two = (
        SessionBreakpoint(1, "blocks.1", 2, "decode", 3),
        SessionBreakpoint(2, "a", 0, extents=(Extent(2, 4), Extent(9, 10))),
    )
    hit = HitInfo(breakpoint=2, point="a", block=0, first=2, end=4, prompt_end=4)

    def found() -> dict[str, BreakpointList]:
        file = JournalFile(str(tmp_path))
        file.close()
        file = JournalFile(str(tmp_path))  # reads what it has folded, too
        try:
            return file.content().breakpoints
        finally:
            file.close()

    file = JournalFile(str(tmp_path))
    for changes in (
        [ONE, TWO, BreakpointSet("one", one), BreakpointSet("two", one)],
        [BreakpointSet("one", two), Extended("one", 0, [7] * 4), Stopped("one", hit), Stopped("two", hit)],
        [BreakpointsEnded("one", [1]), Stopped("two", None), BreakpointSet("gone", one)],
    ):
        file.append(changes)
        if folds:
            file.fold()
    file.close()
    assert found() == {"one": BreakpointList((two,), 2, hit), "two": BreakpointList((one,), 1)}
    write(tmp_path, [Closed("one"), Stopped("one", hit)])
    assert found() == {"two": BreakpointList((one,), 1)}


@pytest.mark.parametrize("folds", [False, True])
def test_conversations_are_read_back_and_go_with_their_session(tmp_path: Path, folds: bool) -> None:
    def found() -> dict[str, ConversationKept]:
        write(tmp_path)  # folds the changes
        file = JournalFile(str(tmp_path))
        try:
            return file.content().conversations
        finally:
            file.close()

    file = JournalFile(str(tmp_path))
    for changes in (
        [ONE, TWO, ConversationKept("one", "", 5), ConversationKept("two", "key", 7)],
        [ConversationKept("one", "", 9), ConversationKept("gone", "", 1)],
    ):
        file.append(changes)
        if folds:
            file.fold()
    file.close()
    assert found() == {"one": ConversationKept("one", "", 9), "two": ConversationKept("two", "key", 7)}
    write(tmp_path, [Closed("one"), ConversationKept("one", "", 10)])
    assert found() == {"two": ConversationKept("two", "key", 7)}


@pytest.mark.parametrize("folds", [False, True])
def test_records_outlive_their_sessions(tmp_path: Path, folds: bool) -> None:
    one, two = (Recorded(7, name, "llama", "one", at, b"\1\0\0\0", b"body") for name, at in (("a", 2.0), ("b", 1.0)))
    file = JournalFile(str(tmp_path))
    for changes in ([ONE, one, two, Recorded(8, "a", "m", "", 3.0, b"", b"")], [Closed("one"), Unrecorded(8, "a")]):
        file.append(changes)
        if folds:
            file.fold()
    file.close()
    replaced = Recorded(7, "b", "qwen", "two", 4.0, b"", b"other")
    for expected, changes in (([two, one], [replaced]), ([one, replaced], [])):
        write(tmp_path)
        file = JournalFile(str(tmp_path))
        assert file.content().records == expected
        file.append(changes)
        file.close()


def test_a_journal_without_breakpoints_is_read_and_written(tmp_path: Path) -> None:
    write(tmp_path, [ONE, added("one", 1, Extent(1))])
    make_older(tmp_path, 4, "breakpoint")
    write(tmp_path, [BreakpointSet("one", SessionBreakpoint(1, "a", 3))])
    assert spans(tmp_path) == {"one": {1: [(1, FOREVER)]}}
    file = JournalFile(str(tmp_path))
    assert [each.number for each in file.content().breakpoints["one"].breakpoints] == [1]
    file.close()


def test_the_file_is_readable_for_the_daemon_s_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    file = JournalFile(str(folder))
    file.append([ONE])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {NAME: 0o600, f"{NAME}-wal": 0o600} and stat.S_IMODE(folder.stat().st_mode) == 0o700
    file.close()


def test_the_file_belongs_to_one_daemon(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path))
    with pytest.raises(StartError, match=r"state directory of a daemon that runs: stop it, or use --state-dir"):
        JournalFile(str(tmp_path))
    file.append([ONE])
    file.close()
    assert kept(tmp_path) == {"one": []}


def test_another_version_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, [ONE])
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StartError, match=f"has version 99 and this djinnd reads {journal_database.VERSION}"):
        JournalFile(str(tmp_path))
    make_older(tmp_path, 2, "edit", "edit_count", "breakpoint")
    assert kept(tmp_path) == {"one": []}


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"no journal at .*--state-dir"):
        JournalFile(str(tmp_path / "file" / "state"))


def test_a_log_that_was_cut_during_a_write_loses_its_last_commits_only(tmp_path: Path) -> None:
    """A power cut may leave such a log. The file is copied while it is open, and the copy's log is cut at each page."""
    file = JournalFile(str(tmp_path / "a"))
    file.append([ONE])
    for start in range(20):
        file.append([Extended("one", start, [start])])
    database, wal = ((tmp_path / "a" / name).read_bytes() for name in (NAME, f"{NAME}-wal"))
    file.close()
    seen = set()
    for cut in range(len(wal) * 2 // 3, len(wal), 1111):  # the schema is in the first part
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / NAME).write_bytes(database)
        (folder / f"{NAME}-wal").write_bytes(wal[:cut])
        tokens = kept(folder)["one"]
        assert tokens == list(range(len(tokens)))
        seen.add(len(tokens))
    assert len(seen) > 5 and 20 not in seen
    assert os.listdir(tmp_path / "a")
