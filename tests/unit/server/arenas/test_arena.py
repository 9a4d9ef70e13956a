from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from djinn_client.errors import OutOfMemory
from djinn_client.transport.host_memory import Bound
from djinnd.server.arenas import arena as arena_module
from djinnd.server.arenas.arena import Arena
from djinnd.server.arenas.header import HEADER_BYTES, VERSION, FillState, Header, start_ticks

ROOT = Path(__file__).parents[3]
FINGERPRINT = "ab" * 32
TORN = Header(1, 1, VERSION, FillState.COMPLETE, 1, 1, FINGERPRINT, "something else", "llama", "/").pack()


@pytest.fixture
def arena(tmp_path):
    arena = Arena(str(tmp_path))
    yield arena
    arena.close()


def content(name):
    return Path("/dev/shm", name.removeprefix("/"))


def header(name):
    return Header.unpack(content(name).read_bytes())


def test_an_object_is_reserved_and_private_and_names_its_owner(arena):
    grant = arena.grant("llama", 100_000, FINGERPRINT)
    stat = content(grant.name).stat()
    assert stat.st_size == grant.offset + 100_000
    assert stat.st_blocks * 512 >= stat.st_size, "memory is not reserved"
    assert stat.st_mode & 0o777 == 0o600
    assert grant.offset % 4096 == 0 and not grant.complete
    found = header(grant.name)
    assert (found.pid, found.start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    assert (found.state, found.payload, found.model, found.fingerprint) == (
        FillState.FILLING,
        100_000,
        "llama",
        FINGERPRINT,
    )
    assert arena.nbytes == stat.st_size and arena.findings() == []


def test_complete_weights_are_granted_again(arena):
    first = arena.grant("llama", 4096, FINGERPRINT)
    assert not arena.grant("llama", 4096, FINGERPRINT).complete, "an engine died while it filled the object"
    arena.complete("llama")
    again = arena.grant("llama", 4096, FINGERPRINT)
    assert again.complete and again.name == first.name
    assert header(first.name).generation == 3


@pytest.mark.parametrize(("nbytes", "fingerprint"), [(8192, FINGERPRINT), (4096, "cd" * 32)])
def test_another_layout_gets_another_object(arena, nbytes, fingerprint):
    first = arena.grant("llama", 4096, FINGERPRINT)
    arena.complete("llama")
    second = arena.grant("llama", nbytes, fingerprint)
    assert not second.complete and second.name != first.name
    assert not content(first.name).exists()


def test_pages_are_complete_as_soon_as_they_are_reserved_and_lie_beside_the_weights(arena):
    weights = arena.grant("llama", 4096, FINGERPRINT)
    pages = arena.grant("llama", 8192, "cd" * 32, "pages")
    assert pages.complete and not weights.complete
    found = header(pages.name)
    assert (found.holds, found.state, found.payload) == ("pages", FillState.COMPLETE, 8192)
    assert header(weights.name).holds == "weights"
    stat = content(pages.name).stat()
    assert stat.st_blocks * 512 >= stat.st_size == pages.offset + 8192, "memory is not reserved"
    assert content(pages.name).read_bytes()[pages.offset :] == bytes(8192), "a page table of zeros holds no pages"
    assert not arena.is_complete("llama"), "the weights are incomplete"
    arena.complete("llama")
    assert arena.is_complete("llama") and not arena.is_complete("gpt2")
    assert (arena.models, arena.nbytes) == ({"llama"}, 2 * HEADER_BYTES + 4096 + 8192)
    assert arena.findings() == []


@pytest.mark.parametrize(
    ("nbytes", "fingerprint", "any_size", "same"),
    [
        (8192, FINGERPRINT, False, True),
        (4096, FINGERPRINT, False, False),
        (4096, FINGERPRINT, True, True),
        (8192, "cd" * 32, True, False),
    ],
)
def test_existing_pages_are_granted_again_if_they_fit(arena, nbytes, fingerprint, any_size, same):
    weights = arena.grant("llama", 4096, FINGERPRINT)
    first = arena.grant("llama", 8192, FINGERPRINT, "pages")
    again = arena.grant("llama", nbytes, fingerprint, "pages", any_size=any_size)
    assert again.complete and (again.name == first.name) == same
    assert content(first.name).exists() == same and content(weights.name).exists()
    assert header(again.name).payload == (8192 if same else nbytes)


def test_weights_can_be_removed_without_the_pages_and_both_together(arena):
    weights, pages = arena.grant("llama", 4096, FINGERPRINT), arena.grant("llama", 4096, FINGERPRINT, "pages")
    arena.remove("llama", "weights")
    assert not content(weights.name).exists() and content(pages.name).exists()
    assert arena.models == {"llama"} and arena.is_complete("llama")
    weights = arena.grant("llama", 4096, FINGERPRINT)
    arena.remove_incomplete("llama")
    assert not content(weights.name).exists() and content(pages.name).exists()
    weights = arena.grant("llama", 4096, FINGERPRINT)
    arena.remove("llama")
    assert not content(weights.name).exists() and not content(pages.name).exists()
    assert arena.models == set() and arena.nbytes == 0


def test_an_error_about_pages_names_their_model_and_leaves_the_weights(arena):
    weights = arena.grant("llama", 4096, FINGERPRINT)
    with pytest.raises(OutOfMemory, match=r"^host_kv of llama needs .* ask for less") as caught:
        arena.grant("llama", 1 << 60, FINGERPRINT, "pages")
    assert caught.value.data["needed"] == (1 << 60) + HEADER_BYTES
    assert content(weights.name).exists() and arena.findings() == []


def test_removing_one_model_leaves_the_other(arena):
    first, second = arena.grant("a", 4096, FINGERPRINT), arena.grant("b", 4096, FINGERPRINT)
    arena.remove("a")
    arena.remove("a")
    assert not content(first.name).exists() and content(second.name).exists()
    assert arena.models == {"b"}
    arena.close()
    assert not content(second.name).exists()


def test_too_little_shared_memory_is_an_error_with_figures_before_anything_is_created(arena):
    room = os.statvfs("/dev/shm")
    size = room.f_blocks * room.f_frsize + (10 << 30)
    with pytest.raises(OutOfMemory, match=r"mount -o remount,size=\d+G") as caught:
        arena.grant("llama", size, FINGERPRINT)
    assert caught.value.data["needed"] == size + HEADER_BYTES
    assert caught.value.data["free"] <= room.f_blocks * room.f_frsize
    assert arena.models == set() and arena.findings() == []


def test_memory_that_another_process_takes_meanwhile_gives_the_same_error(arena, monkeypatch):
    """Two grants see room for both: the second reservation fails, and leaves no object."""

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)  # a real one would take the memory from all daemons under test
    for holds in ("weights", "pages"):
        with pytest.raises(OutOfMemory, match="shared memory"):
            arena.grant("llama", 4096, FINGERPRINT, holds)
    assert arena.models == set() and arena.findings() == []


def test_names_of_models_may_be_long_and_of_any_alphabet(arena):
    grant = arena.grant("größe/" + "x" * 9000, 4096, FINGERPRINT)
    assert header(grant.name).model.startswith("größe/xxx")


def test_findings_name_missing_and_surplus_objects(arena):
    grant, other = arena.grant("llama", 4096, FINGERPRINT), arena.grant("gpt2", 4096, FINGERPRINT)
    stray = content("/djinnd-of-any-name")
    shutil.copy(content(other.name), stray)
    try:
        posix_ipc.unlink_shared_memory(grant.name)
        findings = arena.findings()
    finally:
        stray.unlink()
    assert [finding.split()[-2:] for finding in findings] == [["is", "gone"], ["no", "model"]]
    assert stray.name in findings[1]


def test_an_object_with_a_taken_name_is_left_to_its_owner(arena, monkeypatch):
    """An earlier process had the same pid, as is usual in containers."""
    tokens = iter(["taken", "free"])
    monkeypatch.setattr("djinnd.server.arenas.arena.secrets.token_hex", lambda nbytes: next(tokens))
    digest = hashlib.sha256(b"llama").hexdigest()[:12]
    taken = f"/djinnd-{os.getpid()}-{digest}-taken"
    posix_ipc.SharedMemory(taken, posix_ipc.O_CREX, size=4096).close_fd()
    try:
        assert arena.grant("llama", 4096, FINGERPRINT).name == taken.replace("taken", "free")
        assert arena.findings() == []
    finally:
        posix_ipc.unlink_shared_memory(taken)


@pytest.mark.parametrize("data", [b"", b"DJARENA1", b"X" * 4096, b"DJARENA1" + b"\xff" * 4088, TORN])
def test_bytes_that_are_no_header_are_refused(data):
    with pytest.raises(ValueError, match=r"arena"):
        Header.unpack(data)


def test_a_header_reads_what_it_writes():
    written = Header(7, 9, VERSION, FillState.COMPLETE, 1 << 40, 3, FINGERPRINT, "pages", "org/name", "/var/lib/größe")
    assert len(written.pack()) == HEADER_BYTES
    assert Header.unpack(written.pack()) == written


def test_the_lock_is_not_inherited_by_other_processes(arena):
    """An engine that outlives its daemon for a moment must not seem to be the owner."""
    grant = arena.grant("llama", 4096, FINGERPRINT)
    code = (
        f"import fcntl, os; fcntl.flock(os.open('{content(grant.name)}', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    locked = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert "BlockingIOError" in locked.stderr
    held = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == content(grant.name)]
    assert held and not any(os.get_inheritable(fd) for fd in held)


def test_an_object_beyond_the_memory_limit_is_an_error_and_no_kill(arena, monkeypatch):
    bound = Bound(1 << 20, "the control group /x")
    monkeypatch.setattr(arena_module, "tightest", lambda: bound)
    with pytest.raises(OutOfMemory, match=r"the control group /x leaves 1,048,576") as caught:
        arena.grant("llama", 1 << 20, FINGERPRINT)
    assert caught.value.data["free"] == 1 << 20
    assert arena.models == set()
    arena.grant("llama", 1 << 19, FINGERPRINT)
