"""A journal that was damaged between two daemons, and a clock that jumped: undamaged sessions continue, and no
others."""

from __future__ import annotations

import signal
import sqlite3
import struct
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import SessionNotFound
from djinnctl.doctor import daemon as doctor
from djinnd.server.journal.file import NAME
from djinnd.server.journal.tables.rows import MARK
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon

PROMPTS = [[number, *range(500, 560)] for number in (301, 302, 303)]
NEXT = 4
YEAR = 365 * 86400.0


def successor(journal: Path, start_daemon: DaemonStarter) -> Daemon:
    return start_daemon({"state_dir": str(journal.parent)}, errors=["journal_session_damaged", "journal_repaired"])


def filled(daemon: Daemon) -> list[str]:
    names = []
    for prompt in PROMPTS:
        session = djinn.Session(MODEL, address=daemon.address)
        session.forward(prompt)
        session.steer("blocks.1", [1.0] * 192)
        names.append(session.id)
        session.detach()
    return names


def stop(daemon: Daemon) -> None:
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def goes_on(daemon: Daemon, name: str, prompt: list[int]) -> list[int]:
    session = djinn.Session.attach(name, address=daemon.address)
    assert session.token_ids() == prompt and len(session.edits()) == 1
    tokens = session.generate(max_tokens=NEXT, ignore_eos=True).token_ids
    session.detach()
    return tokens


def test_damage_and_jumping_clocks_cost_damaged_sessions_only(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    journal = daemon.folder / "state" / NAME
    names = filled(daemon)
    with djinn.Session(MODEL, address=daemon.address) as session:
        session.forward(PROMPTS[0])
        session.steer("blocks.1", [1.0] * 192)
        expected = session.generate(max_tokens=NEXT, ignore_eos=True).token_ids
    stop(daemon)

    content = bytearray(journal.read_bytes())
    token = content.index(struct.pack("<3I", 302, 500, 501))
    content[token] ^= 1  # becomes 303, which would be another session's prompt
    journal.write_bytes(content)
    daemon = successor(journal, start_daemon)
    with pytest.raises(SessionNotFound):
        djinn.Session.attach(names[1], address=daemon.address)
    assert f"journal_session_damaged session={names[1]}" in daemon.log and "journal_repaired" in daemon.log
    with daemon.client() as client:
        (note,) = client.status(check=True).notes
    (result,) = doctor.check_notes(daemon.address)
    assert ".damaged-" in note and (result.state, result.finding in note) == ("warn", True)
    assert goes_on(daemon, names[0], PROMPTS[0]) == expected
    assert [info.id for info in djinn.sessions(address=daemon.address)] == [names[0], names[2]]

    stop(daemon)
    for path in journal.parent.glob("*.damaged-*"):
        path.unlink()
    with sqlite3.connect(journal) as db:
        id_, number, at, wall = next(iter(MARK.read(db)))
        MARK.write(db, [(id_, number, at, wall - 10 * YEAR)])  # as if ten years had passed
    db.close()
    daemon = successor(journal, start_daemon)
    assert goes_on(daemon, names[2], PROMPTS[2])
    with daemon.client() as client:
        assert client.status(check=True).notes == client.status(check=True).integrity == []


@pytest.mark.smoke
def test_a_journal_that_is_no_database_costs_its_sessions_only(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    filled(daemon)
    stop(daemon)
    journal = daemon.folder / "state" / NAME
    journal.write_bytes(b"\x93" * 10_000)
    daemon = successor(journal, start_daemon)
    assert djinn.sessions(address=daemon.address) == []
    filled(daemon)
