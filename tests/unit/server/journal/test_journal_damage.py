"""A damaged journal: a session comes back as it was, or not at all. Damage never prevents a start."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.server.handover.socket_path import StartError
from djinnd.server.journal import database as journal_database
from djinnd.server.journal.changes import Change, Extended, SessionAdded
from djinnd.server.journal.database import VERSION, damaged_files
from djinnd.server.journal.file import NAME, JournalFile
from djinnd.server.journal.fold import Fold
from djinnd.server.journal.tables.breakpoints import BreakpointSet
from djinnd.server.journal.tables.edits import Edited
from djinnd.server.journal.tables.prefixes import Published
from djinnd.server.journal.tables.rows import DamagedRow
from djinnd.server.probe_lists.breakpoint_list import SessionBreakpoint

SESSIONS = [f"{number:016x}" for number in range(12)]
PREFIX = Published("p1", "llama", 0, 7.5, list(range(300)))
HEADER = 100  # bytes of SQLite's file header


def edit(session: str, number: int) -> Edited:
    told = Edit(number, (Point("resid", 3),), "add", (Extent(3, 5),), rows=1, values=bytes([number]) * 300)
    return Edited(session, told, [f"blocks.{number}"])


def commits() -> list[list[Change]]:
    """Several rows for each session, so that a missing row makes a difference."""
    made: list[list[Change]] = [[PREFIX]]
    for number, name in enumerate(SESSIONS):
        made.append(
            [SessionAdded(name, 1000 + number, "llama", False, "agent", 5.0), Extended(name, 0, [number] * 700)]
        )
        made.append(
            [edit(name, 1), edit(name, 2), BreakpointSet(name, SessionBreakpoint(1, "blocks.1", 2, "decode", 3))]
        )
    for number, name in enumerate(SESSIONS):
        made.append([Extended(name, 600, [number + 100] * 50), edit(name, 3)])
    return made


def state(file: JournalFile) -> dict[str, object]:
    edits, breakpoints = file.content().edits, file.content().breakpoints
    return {
        each.id: (
            each.user,
            each.model,
            each.priority,
            each.tokens.tolist(),
            edits.get(each.id),
            breakpoints.get(each.id),
        )
        for each in file.content().sessions
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The state of each session after each commit."""
    folder = tmp_path_factory.mktemp("states")
    file, seen = JournalFile(str(folder)), dict[str, list[object]]()
    for changes in commits():
        file.append(changes)
        file.fold()
        for name, now in state(file).items():
            seen.setdefault(name, []).append(now)
    file.close()
    return seen


@pytest.fixture(scope="module", params=[True, False], ids=["folded", "unfolded"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    file = JournalFile(str(folder))
    for changes in commits():
        file.append(changes)
    if request.param:
        file.leave()
    file.close()
    return request.param, (folder / NAME).read_bytes()


def opened(folder: Path, content: bytes | bytearray) -> dict[str, object]:
    """The sessions that the next daemon finds in this file, checked against the daemon after that."""
    folder.mkdir()
    (folder / NAME).write_bytes(content)
    (folder / NAME).chmod(0o600)
    first = JournalFile(str(folder))
    found = state(first)
    assert first.content().prefixes in ([], [PREFIX])
    first.append([SessionAdded("new", 1, "m", False, "agent", 1.0), Extended("new", 0, [1])])
    first.leave()
    first.close()
    aside = len(damaged_files(folder))
    second = JournalFile(str(folder))
    assert state(second) == found | {"new": (1, "m", "agent", [1], None, None)}
    second.close()
    assert len(damaged_files(folder)) == aside <= 1, "the new file is sound"
    return found


def expect_true(found: dict[str, object], states: dict[str, list[object]], is_folded: bool) -> None:
    """Checks that each session is in its last state, or, if changes are not folded, in one of its states: a change that
    is lost together with its session's name takes the session back to an earlier state."""
    for name, now in found.items():
        assert now == states[name][-1] if is_folded else now in states[name], name


def flipped(content: bytes, places: list[int], choice: random.Random) -> bytearray:
    damaged = bytearray(content)
    for place in places:
        damaged[place] ^= 1 << choice.randrange(8)
    return damaged


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits(
    tmp_path: Path,
    whole: tuple[bool, bytes],
    states: dict[str, list[object]],
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_folded, content = whole
    choice, kept = random.Random(seed), 0
    for case in range(30):
        places = [choice.randrange(HEADER, len(content)) for _ in range(1 + case % 3)]
        found = opened(tmp_path / str(case), flipped(content, places, choice))
        expect_true(found, states, is_folded)
        kept += len(found)
    assert kept > 30 * len(SESSIONS) * 0.6, "most sessions are kept"
    assert "journal_repaired" in caplog.text


def test_a_flipped_token_takes_its_session_and_no_other(
    tmp_path: Path, whole: tuple[bool, bytes], states: dict[str, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    is_folded, content = whole
    tokens = bytes([104, 0, 0, 0]) * 50 if is_folded else bytes([104]) * 50
    damaged = bytearray(content)
    damaged[content.index(tokens) + 8] ^= 1
    found = opened(tmp_path / "a", damaged)
    expect_true(found, states, is_folded)
    assert SESSIONS[4] not in found
    if is_folded:
        assert set(found) == set(SESSIONS) - {SESSIONS[4]}
    assert "journal_repaired" in caplog.text
    assert damaged_files(tmp_path / "a")[0].stat().st_mode & 0o777 == 0o600


def zeroed(content: bytes) -> bytes:
    return content[: 4096 * 3] + bytes(4096 * 2) + content[4096 * 5 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:4096],
        lambda content: content[:2000],
        lambda content: random.Random(1).randbytes(8192),
        lambda content: b"a letter to grandmother " * 1000,
        zeroed,
        lambda content: content[:16] + bytes(4080) + content[4096:],
        lambda content: b"\0" * len(content),
    ],
)
def test_a_file_that_is_hardly_one(
    tmp_path: Path, whole: tuple[bool, bytes], states: dict[str, list[object]], damage: Callable[[bytes], bytes]
) -> None:
    is_folded, content = whole
    damaged = damage(content)
    found = opened(tmp_path / "a", damaged)
    expect_true(found, states, is_folded)
    (aside,) = damaged_files(tmp_path / "a")
    assert aside.read_bytes()[4096:] == damaged[4096:], "the damaged file is kept for people"


def test_one_zeroed_page_leaves_the_sessions_of_others(
    tmp_path: Path, whole: tuple[bool, bytes], states: dict[str, list[object]]
) -> None:
    is_folded, content = whole
    counts = []
    for page in range(1, len(content) // 4096):
        damaged = content[: page * 4096] + bytes(4096) + content[(page + 1) * 4096 :]
        found = opened(tmp_path / str(page), damaged)
        expect_true(found, states, is_folded)
        counts.append(len(found))
    expected = len(SESSIONS) - 3 if is_folded else 1  # a page of changes concerns many sessions
    assert sorted(counts)[len(counts) // 2] >= expected


@pytest.mark.parametrize("table", ["session", "edit", "edit_count", "breakpoint", "change", "mark"])
def test_a_missing_row_is_noticed(
    tmp_path: Path, whole: tuple[bool, bytes], states: dict[str, list[object]], table: str
) -> None:
    is_folded, content = whole
    (tmp_path / NAME).write_bytes(content)
    with sqlite3.connect(tmp_path / NAME) as db:
        gone = db.execute(f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} LIMIT 1 OFFSET 3)").rowcount
    db.close()
    file = JournalFile(str(tmp_path))
    found = state(file)
    file.close()
    expect_true(found, states, is_folded)
    assert len(SESSIONS) - 2 <= len(found) <= len(SESSIONS)
    assert len(damaged_files(tmp_path)) == gone


def test_only_the_last_few_damaged_files_are_kept(tmp_path: Path) -> None:
    for number in range(journal_database.KEPT_DAMAGED + 2):
        (tmp_path / NAME).write_bytes(bytes([number]) * 100)
        JournalFile(str(tmp_path)).close()
    kept = damaged_files(tmp_path)
    assert [path.read_bytes()[0] for path in kept] == [2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == [NAME, *(path.name for path in kept)]


def test_a_later_version_is_left_alone(tmp_path: Path, whole: tuple[bool, bytes]) -> None:
    _, content = whole
    (tmp_path / NAME).write_bytes(content)
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
        db.execute("ALTER TABLE session DROP COLUMN checksum")
    db.close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(
        StartError, match=f"has version {VERSION + 1} and this djinnd reads {VERSION}: start the djinnd"
    ):
        JournalFile(str(tmp_path))
    assert (tmp_path / NAME).read_bytes() == before and not damaged_files(tmp_path)


def test_damage_while_a_daemon_runs_is_not_folded_into_a_sound_row(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path))
    file.append([SessionAdded("one", 1, "m", False, "agent", 1.0), Extended("one", 0, [1, 2, 3])])
    file.fold()
    file.close()
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as db:
        db.execute("UPDATE session SET tokens = x'0100000002000000ff000000'")
        with pytest.raises(DamagedRow, match="session"):
            Fold(db).apply(2.0, Extended("one", 3, [4]))
    second = JournalFile(str(tmp_path))
    assert second.content().sessions == []
    second.close()
