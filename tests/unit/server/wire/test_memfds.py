"""The server's checks of a client's memory before an engine reads it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.transport.shm import FUTURE_WRITE, SEALS, new_window, seal_for_writers
from djinnd.server.wire.memfds import open_window
from tests.support.descriptors import open_descriptors

NBYTES = 3 * 4096 + 512


@contextmanager
def closed_after(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def refused(fd: int, words: str, for_good: bool = False) -> None:
    before = open_descriptors()
    with pytest.raises(InvalidRequest, match=words):
        open_window(fd, NBYTES, "the KV", for_good=for_good)
    assert open_descriptors() == before


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, FUTURE_WRITE])
def test_a_sealed_window_is_opened_for_reading(seal: int) -> None:
    with closed_after(new_window("kv", NBYTES)) as fd:
        os.pwrite(fd, b"kv", NBYTES - 2)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        with closed_after(open_window(fd, NBYTES, "the KV", for_good=False)) as ours:
            assert ours != fd and os.pread(ours, 9, NBYTES - 2) == b"kv"
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(ours, b"x")


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, FUTURE_WRITE])
def test_every_seal_is_needed(missing: int) -> None:
    with closed_after(os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        os.posix_fallocate(fd, 0, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, (SEALS | FUTURE_WRITE) & ~missing)
        refused(fd, f"its seals are {(SEALS | FUTURE_WRITE) & ~missing:#x}")


def test_memory_handed_over_for_good_must_be_sealed_against_existing_mappings() -> None:
    with closed_after(new_window("weights", NBYTES)) as fd:
        seal_for_writers(fd)
        refused(fd, f"its seals are {SEALS | FUTURE_WRITE:#x}", for_good=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with closed_after(open_window(fd, NBYTES, "the weights", for_good=True)):
            pass


@pytest.mark.parametrize("nbytes", [1, NBYTES - 1, NBYTES + 1])
def test_a_window_of_another_size(nbytes: int) -> None:
    with closed_after(new_window("kv", nbytes)) as fd:
        seal_for_writers(fd)
        refused(fd, f"the window of the KV has {nbytes:,} bytes; {NBYTES:,} were announced")


def test_a_window_with_holes() -> None:
    with closed_after(os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | FUTURE_WRITE)
        refused(fd, f"memory for 0 of {NBYTES:,} bytes")


def test_a_descriptor_that_cannot_be_sealed_is_refused() -> None:
    read, write = os.pipe()
    with closed_after(read), closed_after(write):
        refused(read, "the descriptor is no memfd")
