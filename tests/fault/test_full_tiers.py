"""Tiers that are full, or cannot be created: the client that requested them gets the reason, and all tokens stay the
same."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import djinn_client as djinn
from djinn_client import OutOfMemory, Session
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import wait_for
from tests.support.lives import Lives

pytestmark = pytest.mark.smoke

PROMPTS = [[number, *range(100, 650)] for number in range(10, 14)]  # three pages each
NEXT = 4
PAGE = 1 << 20


@contextmanager
def largest_file(pid: int, nbytes: int) -> Iterator[None]:
    """Simulates a full disk for a process: writes behind `nbytes` of a file fail."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def begin(lives: Lives) -> tuple[list[Session], list[list[int]]]:
    """Opens sessions; returns them, and the next tokens of each."""
    sessions, following = [], []
    for prompt in PROMPTS:
        session = Session(MODEL, address=lives.address)
        session.generate(prompt, max_tokens=1, ignore_eos=True)
        with session.fork() as fork:
            following.append(fork.generate(max_tokens=NEXT, ignore_eos=True).token_ids)
        sessions.append(session)
    return sessions, following


def go_on(session: Session, following: list[int]) -> None:
    length = len(session.token_ids())
    assert session.generate(max_tokens=NEXT, ignore_eos=True).token_ids == following
    session.truncate(length)


def test_a_full_disk(start_daemon: DaemonStarter) -> None:
    """Device and host are so small that sessions must go to disk."""
    lives = Lives(start_daemon, {"kv": "9MiB", "host_kv": "6MiB", "disk_kv": "32MiB"})
    lives.wait_for_tiers()
    sessions, following = begin(lives)
    first, *others = sessions
    with largest_file(lives.engine(), PAGE):  # one page
        with pytest.raises(OutOfMemory, match=r"found no room on disk, /.*/pages: make some") as caught:
            first.pause("disk")
        assert caught.value.data["tier"] == "disk"
        states = {info.id: info.state for info in djinn.sessions(address=lives.address)}
        assert states[first.id] != "paused"
        for session in others:
            session.signal("IO_WAIT")
        wait_for(lambda: "write out: [Errno" in lives.log)
        for session, wanted in zip(sessions, following, strict=True):
            go_on(session, wanted)
    go_on(first, following[0])  # its KV is all on the device; a full disk may have let others evict it
    assert first.pause("disk").pages == 3
    first.unpause()
    for session, wanted in zip(sessions, following, strict=True):
        go_on(session, wanted)
        session.close()
    assert djinn.status(check=True, address=lives.address).integrity == []


def test_an_arena_without_room(start_daemon: DaemonStarter) -> None:
    lives = Lives(start_daemon, {"kv": "16MiB", "host_kv": "4096GiB", "disk_kv": "16MiB"})
    sessions, following = begin(lives)

    def notes() -> list[str]:
        (model,) = [info for info in djinn.models(address=lives.address) if info.name == MODEL]
        assert model.state == "ready" and model.host_pages == model.disk_pages == 0
        return [note for note in model.notes if "no pages on the host" in note]

    wait_for(notes)
    assert re.search(r"host_kv of djinn-tiny needs [\d,]+ bytes of shared memory and /dev/shm has [\d,]+", notes()[0])
    for tier in ("host", "disk"):
        with pytest.raises(OutOfMemory, match=f"on the {tier} tier .*: no pages on the host: host_kv of {MODEL} needs"):
            sessions[0].pause(tier)  # type: ignore[arg-type]
    sessions[0].signal("IO_WAIT")
    for session, wanted in zip(sessions, following, strict=True):
        go_on(session, wanted)
        session.close()
    assert djinn.status(check=True, address=lives.address).integrity == []
