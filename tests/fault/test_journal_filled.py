"""One user fills the journal with all kinds of data: that user is refused, with the figure, and all others go on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client import QuotaExceeded
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.daemon import PATIENCE, Daemon
from tests.support.other_user import as_user, only_root, open_to_all

ATTACKER = 23002
LIMIT = 256 << 10
POSITIONS = list(range(128))
VALUES = np.ones((len(POSITIONS), 192), np.float32)  # 96 KiB
LARGE = np.ones((2048, 192), np.float32)  # 1.5 MiB
MANY = 400  # attacks; each kind is refused long before
LIMITS = {"journal_bytes_per_user": "256KiB", "breakpoints_per_session": 100_000}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        running = start({"limits": LIMITS})
        open_to_all(running.folder, running.address)
        yield running


class Attacker:
    """Sessions of another user."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sessions: list[djinn.Session] = []
        with as_user(ATTACKER):
            self.client = djinn.Client(address)
            self.client.ping()

    def open(self) -> djinn.Session:
        with as_user(ATTACKER):
            session = djinn.Session(MODEL, address=self.address)
            self.sessions.append(session)
            session.token_ids()  # connects as that user
        return session

    def used(self) -> int:
        (quota,) = self.client.quotas()
        return next(use.used for use in quota.resources if use.name == "journal_bytes")

    def clear(self) -> None:
        for session in self.sessions:
            session.close()
        self.sessions.clear()

    def close(self) -> None:
        self.clear()
        self.client.close()


@pytest.fixture
def attacker(daemon: Daemon) -> Iterator[Attacker]:
    attacker = Attacker(daemon.address)
    yield attacker
    attacker.close()


def by_edits(attacker: Attacker, number: int) -> None:
    session = attacker.open() if number % 10 == 0 else attacker.sessions[-1]
    session.steer(f"blocks.{number % 8}", VALUES, positions=POSITIONS)


def by_forks(attacker: Attacker, number: int) -> None:
    if number == 0:
        session = attacker.open()
        session.steer("blocks.1", VALUES, positions=POSITIONS)
    with as_user(ATTACKER):
        attacker.sessions.append(attacker.sessions[0].fork())


def by_breakpoints(attacker: Attacker, number: int) -> None:
    session = attacker.open() if number == 0 else attacker.sessions[-1]
    session.breakpoint("blocks.1", positions=list(range(number % 2, 1000, 2)))


def by_prompts(attacker: Attacker, number: int) -> None:
    attacker.open().generate([1] * 2000, max_tokens=1)


def all_of_it(attack: Callable[[Attacker, int], None], attacker: Attacker) -> None:
    for number in range(MANY):
        attack(attacker, number)


@only_root
@pytest.mark.parametrize(
    "attack", [pytest.param(by_edits, marks=pytest.mark.smoke), by_forks, by_breakpoints, by_prompts]
)
def test_a_user_is_refused_at_its_limit(
    daemon: Daemon, attacker: Attacker, attack: Callable[[Attacker, int], None]
) -> None:
    with Bystander(daemon.address), pytest.raises(QuotaExceeded, match=r"limits\.journal_bytes_per_user is") as caught:
        all_of_it(attack, attacker)
    assert caught.value.data["quota"] == "journal_bytes"
    assert LIMIT // 2 < attacker.used() <= LIMIT
    with djinn.Session(MODEL, address=daemon.address) as session:
        session.steer("blocks.1", VALUES, positions=POSITIONS)
        assert len(session.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids) == 2
    attacker.clear()
    assert attacker.used() == 0
    attack(attacker, 0)
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


@only_root
def test_a_user_is_refused_on_a_nearly_full_disk(daemon: Daemon, attacker: Attacker) -> None:
    """A reserve that is larger than the free bytes of any disk stands for a nearly full disk."""
    by_edits(attacker, 0)
    with djinn.Session(MODEL, address=daemon.address) as other:
        other.generate([1, 2], max_tokens=2)
        reserve = 1 << 60
        daemon.reload({"limits": LIMITS | {"journal_reserve": f"{reserve}B"}})
        by_edits(attacker, 1)  # far less than a share
        assert "journal_short" in daemon.log
        other.generate([3], max_tokens=2)
        daemon.reload({"limits": LIMITS | {"journal_reserve": "1MiB"}})
        attacker.clear()
        end = time.monotonic() + PATIENCE
        while "journal_has_room" not in daemon.log:  # free bytes exceed the reserve
            assert time.monotonic() < end
            other.generate([3], max_tokens=2)


def by_large_edits(attacker: Attacker, number: int) -> None:
    """From many connections at once: all edits are admitted before the first is written."""
    sessions = [attacker.open() for _ in range(8)]

    def steer(session: djinn.Session) -> None:
        for block in range(6):
            session.steer(f"blocks.{block}", LARGE, positions=list(range(2048)))

    with ThreadPoolExecutor(len(sessions)) as pool:
        done = [pool.submit(steer, session) for session in sessions]
    for each in done:
        each.result()


def by_large_forks(attacker: Attacker, number: int) -> None:
    if number == 0:
        session = attacker.open()
        for block in range(6):
            session.steer(f"blocks.{block}", LARGE, positions=list(range(2048)))
    with as_user(ATTACKER):
        attacker.sessions.append(attacker.sessions[0].fork())


def can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with its journal on a disk of 80 MiB, in a mount namespace of its own."""
    if not can_mount():
        pytest.skip("a small disk needs the right to mount")
    folder = tmp_path_factory.mktemp("disk")
    mounted = f'mount -t tmpfs -o size=80m tmpfs {folder} && exec "$@"'
    with DaemonStarter() as start:
        config = {"state_dir": str(folder), "limits": {"journal_reserve": "32MiB"}}
        running = start(config, wrapper=["unshare", "-m", "sh", "-c", mounted, "sh"])
        open_to_all(running.folder, running.address)
        yield running


@pytest.mark.parametrize("attack", [by_large_edits, by_large_forks])
def test_a_small_disk_that_one_user_fills(small_disk: Daemon, attack: Callable[[Attacker, int], None]) -> None:
    address = small_disk.address
    attacker = Attacker(address)
    try:
        with Bystander(address):
            for _ in range(2):  # the second time the disk is nearly full from the start
                with pytest.raises(QuotaExceeded, match=r"less than limits\.journal_reserve") as caught:
                    all_of_it(attack, attacker)
                assert caught.value.data["quota"] == "journal_reserve"
        with djinn.Session(MODEL, address=address) as session:
            session.steer("blocks.1", VALUES, positions=POSITIONS)
            assert len(session.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids) == 2
        attacker.clear()
        attacker.open().steer("blocks.1", LARGE, positions=list(range(2048)))
    finally:
        attacker.close()
    assert "journal_failed" not in small_disk.log
    assert "journal_not_tidied" not in small_disk.log
