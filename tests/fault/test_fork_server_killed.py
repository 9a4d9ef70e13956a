"""The process that forks engines dies, or survives other deaths: sessions continue in both cases."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, descriptors_of, is_alive, wait_for

PROMPT = "def fibonacci("
BEFORE, AFTER = 8, 12  # tokens


@pytest.fixture
def fragile(start_daemon: DaemonStarter) -> Daemon:
    running = start_daemon(errors=["engine_lost"], cold=True)
    with running.client() as client:
        client.load(MODEL)
    return running


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def inherited_by(engine: int) -> list[str]:
    """The engine's descriptors, except those of models' memory and files, which it opens for loaded models."""
    return [name for name in descriptors_of(engine) if not name.startswith("/dev/shm/") and "/pages/" not in name]


def next_engine(daemon: Daemon, after: int) -> int:
    wait_for(lambda: (device := daemon.device()).state == "ready" and device.pid != after)
    return daemon.device().pid


def test_a_killed_fork_server_comes_back_with_its_engine_and_dies_with_a_killed_daemon(
    fragile: Daemon, start_daemon: DaemonStarter
) -> None:
    with djinn.Session(MODEL, address=fragile.address) as whole:
        expected = whole.generate(PROMPT, max_tokens=BEFORE + AFTER, ignore_eos=True).token_ids
    engine = fragile.device().pid
    fork_server = parent_of(engine)
    with djinn.Session(MODEL, address=fragile.address) as s:
        s.generate(PROMPT, max_tokens=BEFORE, ignore_eos=True)
        os.kill(fork_server, signal.SIGKILL)
        successor = next_engine(fragile, after=engine)
        assert s.generate(max_tokens=AFTER, ignore_eos=True).token_ids == expected[BEFORE:]
    assert not is_alive(engine) and not is_alive(fork_server)
    assert parent_of(parent_of(successor)) == fragile.pid
    assert djinn.status(check=True, address=fragile.address).integrity == []

    fork_server = parent_of(successor)
    fragile.kill()
    assert not is_alive(fork_server)
    next_daemon = start_daemon({"socket": fragile.address, "state_dir": str(fragile.folder / "state")}, cold=True)
    assert parent_of(parent_of(fragile.device().pid)) == next_daemon.pid
    djinn.load(MODEL, address=fragile.address)  # the objects of the killed daemon are adopted
    djinn.unload(MODEL, address=fragile.address)


def test_the_fork_server_survives_engines_and_restarts(fragile: Daemon) -> None:
    """Each engine has the same descriptors as the first."""
    with djinn.Session(MODEL, address=fragile.address) as s:
        expected = s.generate(PROMPT, max_tokens=AFTER, ignore_eos=True).token_ids
    engine = fragile.device().pid
    fork_server, descriptors = parent_of(engine), inherited_by(engine)
    os.kill(engine, signal.SIGKILL)
    engine = next_engine(fragile, after=engine)
    with fragile.client() as client:
        assert parent_of(engine) == fork_server
        for warm in (True, False):
            restart(client, warm=warm)
            with djinn.Session(MODEL, address=fragile.address) as s:
                assert s.generate(PROMPT, max_tokens=AFTER, ignore_eos=True).token_ids == expected
            engine = fragile.device().pid
            assert (parent_of(engine), inherited_by(engine)) == (fork_server, descriptors)
            assert client.status(check=True).integrity == []
    assert "fork_server_lost" not in fragile.log
