"""Adoption of arena objects by a new daemon. Owners are other descriptors or other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from djinnd.server.arenas.arena import Arena
from djinnd.server.arenas.header import HEADER_BYTES, FillState, Header, start_ticks

ROOT = Path(__file__).parents[3]
FINGERPRINT = "ab" * 32
OWNER = """
import sys, time
from djinnd.server.arenas.arena import Arena

arena = Arena(sys.argv[1])
for model in sys.argv[2:]:
    print(arena.grant(model, 4096, "ab" * 32).name, flush=True)
    arena.complete(model)
print("complete", flush=True)
time.sleep(600)
"""


@pytest.fixture
def state(tmp_path):
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def successor(state):
    arena = Arena(str(state))
    yield arena
    arena.close()


def path_of(name):
    return Path("/dev/shm", name.removeprefix("/"))


def header_of(name):
    return Header.unpack(path_of(name).read_bytes())


def left_by(folder, **changes):
    """Returns the name of an object that an arena with that state directory has left, filled with W's. `changes` apply
    to its header, or to its `size`."""
    size = changes.pop("size", None)
    arena = Arena(str(folder))
    name = arena.grant(changes.get("model", "llama"), 4096, FINGERPRINT).name
    with path_of(name).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"W" * 4096)
    arena.complete(changes.get("model", "llama"))
    arena.leave()
    header = header_of(name)._replace(pid=1 << 22, **changes)
    with path_of(name).open("r+b") as file:
        file.write(header.pack())
    if size is not None:
        os.truncate(path_of(name), size)
    return name


def test_complete_objects_are_adopted_and_granted_unchanged(state, successor):
    name = left_by(state)
    assert successor.adopt() == ["llama"]
    assert (successor.models, successor.nbytes, successor.findings()) == ({"llama"}, HEADER_BYTES + 4096, [])
    header = header_of(name)
    assert (header.pid, header.start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    grant = successor.grant("llama", 4096, FINGERPRINT)
    assert grant.complete and grant.name == name
    assert header_of(name).generation == header.generation + 1
    assert path_of(name).read_bytes()[grant.offset :] == b"W" * 4096
    successor.close()
    assert not path_of(name).exists()


@pytest.mark.parametrize(("nbytes", "fingerprint"), [(8192, FINGERPRINT), (4096, "cd" * 32)])
def test_an_adopted_object_whose_checkpoint_has_changed_is_replaced(state, successor, caplog, nbytes, fingerprint):
    before = path_of(left_by(state)).stat()
    successor.adopt()
    with caplog.at_level("INFO"):
        grant = successor.grant("llama", nbytes, fingerprint)
    assert not grant.complete
    assert not os.path.samestat(path_of(grant.name).stat(), before)
    assert b"W" not in path_of(grant.name).read_bytes()[HEADER_BYTES:]
    assert "model=llama holds=weights reason=the checkpoint or its layout has changed" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": FillState.FILLING}, "the weights of llama are incomplete"),
        ({"version": 1}, "arena version 1, this daemon knows 4"),
        ({"state": 7}, "7 is not a valid FillState"),
        ({"holds": "else"}, "an arena object that holds 'else'"),
        ({"size": HEADER_BYTES + 100}, "it has 4,196 bytes and should have 8,192"),
        ({"payload": 1 << 40}, "it has 8,192 bytes and should have"),
        ({"state_dir": "/nowhere/at/all"}, "its daemon's state directory /nowhere/at/all is gone"),
    ],
)
def test_useless_objects_are_removed_and_the_reason_is_logged(state, successor, caplog, monkeypatch, changes, why):
    monkeypatch.setattr(
        "djinnd.server.arenas.arena.PREFIX", f"adoption-{os.getpid()}-"
    )  # any daemon that starts removes it
    name = left_by(state, **changes)
    with caplog.at_level("INFO"):
        assert successor.adopt() == []
    assert not path_of(name).exists()
    assert why in caplog.text


def test_an_empty_object_of_a_dead_process_is_removed(successor, monkeypatch):
    """The object has no header, only the pid in its name. A living process may be about to write one."""
    monkeypatch.setattr("djinnd.server.arenas.arena.PREFIX", prefix := f"adoption-{os.getpid()}-")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"/{prefix}{pid}-abc-1" for pid in (ended.pid, os.getpid())]
    for name in names:
        posix_ipc.SharedMemory(name, posix_ipc.O_CREX).close_fd()
    try:
        assert successor.adopt() == []
        assert [path_of(name).exists() for name in names] == [False, True]
    finally:
        posix_ipc.unlink_shared_memory(names[1])


def test_a_sleeping_model_is_adopted_as_asleep_until_it_is_granted_again(state, successor):
    before = Arena(str(state))
    weights, pages = before.grant("m", 4096, FINGERPRINT), before.grant("m", 8192, "cd" * 32, "pages")
    before.complete("m")
    assert not before.is_asleep("m") and not before.is_asleep("nobody")
    before.rest("m")
    assert before.is_asleep("m") and before.is_complete("m") and before.findings() == []
    before.grant("half", 4096, FINGERPRINT)
    before.rest("half")
    assert not before.is_asleep("half") and not before.is_complete("half"), "incomplete objects are useless"
    before.leave()
    assert successor.adopt() == ["m"] and successor.is_asleep("m")
    assert successor.grant("m", 4096, FINGERPRINT) == weights._replace(complete=True)
    assert not successor.is_asleep("m")
    assert successor.grant("m", 8192, "cd" * 32, "pages") == pages
    assert header_of(pages.name).state is FillState.COMPLETE


def test_one_of_two_objects_of_a_model_is_adopted_and_the_other_removed(state, successor):
    names = [left_by(state) for _ in range(2)]
    assert successor.adopt() == ["llama"]
    assert [path_of(name).exists() for name in sorted(names)] == [True, False]


def test_both_weights_and_pages_of_a_model_are_adopted(state, successor):
    arena = Arena(str(state))
    weights, pages = arena.grant("m", 4096, FINGERPRINT), arena.grant("m", 8192, "cd" * 32, "pages")
    alone = arena.grant("alone", 8192, FINGERPRINT, "pages")
    arena.complete("m")
    with path_of(pages.name).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"P" * 8192)
    arena.leave()
    assert successor.adopt() == ["alone", "m"]
    assert successor.grant("m", 4096, FINGERPRINT) == weights._replace(complete=True)
    assert successor.grant("m", 8192, "cd" * 32, "pages") == pages
    assert path_of(pages.name).read_bytes()[HEADER_BYTES:] == b"P" * 8192
    assert successor.grant("alone", 4096, FINGERPRINT, "pages", any_size=True) == alone
    again = successor.grant("m", 8192, FINGERPRINT, "pages")
    assert path_of(again.name).read_bytes()[HEADER_BYTES:] == bytes(8192), "pages of other weights"
    assert path_of(weights.name).exists()


def test_pages_are_adopted_beside_incomplete_weights(state, successor):
    arena = Arena(str(state))
    weights, pages = arena.grant("m", 4096, FINGERPRINT), arena.grant("m", 8192, FINGERPRINT, "pages")
    arena.leave()
    assert (path_of(weights.name).exists(), path_of(pages.name).exists()) == (False, True)
    assert successor.adopt() == ["m"]


def test_objects_of_another_state_directory_are_left_to_its_daemon(state, successor, tmp_path):
    whole, half = left_by(tmp_path), left_by(tmp_path, model="half", state=FillState.FILLING)
    assert successor.adopt() == []
    assert path_of(whole).exists() and path_of(half).exists()
    other = Arena(str(tmp_path))
    assert other.adopt() == ["llama"]
    assert not path_of(half).exists()
    other.close()


def test_other_shared_memory_objects_stay(successor):
    name = "/djinnd-1-of-somebody-else"
    memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=8192)
    try:
        assert successor.adopt() == []
        assert path_of(name).exists()
    finally:
        memory.close_fd()
        posix_ipc.unlink_shared_memory(name)


def test_a_link_is_not_followed(successor, tmp_path):
    link = path_of("/djinnd-link")
    (tmp_path / "target").write_bytes(b"DJARENA1" + bytes(8192))
    link.symlink_to(tmp_path / "target")
    try:
        assert successor.adopt() == []
        assert link.is_symlink()
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may own another user's object")
def test_an_object_of_another_user_is_not_adopted_whatever_its_header_says(state, successor):
    name = left_by(state)
    os.chown(path_of(name), 65534, 65534)
    try:
        assert successor.adopt() == []
        assert path_of(name).exists()
    finally:
        path_of(name).unlink()


def test_objects_of_a_living_owner_are_left_alone_until_it_is_gone(state, successor):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state), "a", "b"], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as owner:
        names = [owner.stdout.readline().strip() for _ in range(2)]
        assert owner.stdout.readline() == "complete\n"
        assert successor.adopt() == []
        owner.send_signal(signal.SIGKILL)
    assert sorted(successor.adopt()) == ["a", "b"]
    assert all(path_of(name).exists() for name in names)


def test_one_of_two_daemons_that_start_at_once_adopts_each_object(state):
    """Each daemon is a process of its own. They are released at the same moment, and both look at every object."""
    count = 20
    names = [left_by(state, model=f"m{number}") for number in range(count)]
    code = (
        "import sys; from djinnd.server.arenas.arena import Arena; "
        "arena = Arena(sys.argv[1]); print('ready', flush=True);"
        "input(); print(*arena.adopt(), flush=True); input(); arena.close()"
    )
    command = [sys.executable, "-c", code, str(state)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        both = (one, other)
        for process in both:
            assert process.stdout.readline() == "ready\n"
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
        adopted = [process.stdout.readline().split() for process in both]
        assert sorted(adopted[0] + adopted[1]) == sorted(f"m{number}" for number in range(count))
        assert all(path_of(name).exists() for name in names)
        for process in both:
            process.stdin.write("\n")
            process.stdin.close()
    assert not any(path_of(name).exists() for name in names)


def test_an_object_that_is_removed_before_it_is_locked_is_not_adopted(state, successor, monkeypatch):
    """Its name is gone then, so its memory must not be used."""
    name = left_by(state)
    real = os.pread

    def removed_meanwhile(fd, size, offset):
        data = real(fd, size, offset)
        path_of(name).unlink(missing_ok=True)
        return data

    monkeypatch.setattr(os, "pread", removed_meanwhile)
    assert successor.adopt() == []
    assert successor.models == set()


def test_leaving_keeps_complete_objects_and_removes_the_others(state, successor):
    arena = Arena(str(state))
    whole, half = arena.grant("whole", 4096, FINGERPRINT), arena.grant("half", 4096, FINGERPRINT)
    arena.complete("whole")
    arena.leave()
    assert (path_of(whole.name).exists(), path_of(half.name).exists()) == (True, False)
    assert arena.models == set() and arena.nbytes == 0
    assert successor.adopt() == ["whole"], "its lock is released too"
