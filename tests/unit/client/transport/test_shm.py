from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djinn_client.errors import ProtocolError
from djinn_client.transport.shm import SEALS, map_window


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:outlives")


def test_the_bytes_are_those_of_the_object(memfd: int) -> None:
    os.write(memfd, b"abcdef")
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
    assert bytes(map_window(memfd, 4)) == b"abcd"


def test_the_mapping_outlives_the_descriptor_and_dies_with_its_last_view() -> None:
    fd = os.memfd_create("outlives", os.MFD_ALLOW_SEALING)
    os.write(fd, b"abcdef")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    window = map_window(fd, 6)
    os.close(fd)
    part = window[2:4]
    del window
    gc.collect()
    assert bytes(part) == b"cd"
    assert mappings() == 1
    del part
    gc.collect()
    assert mappings() == 0


def test_a_mapping_is_unmapped_by_its_runner() -> None:
    fd = os.memfd_create("outlives", os.MFD_ALLOW_SEALING)
    os.write(fd, b"abcdef")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    later: list[tuple[Any, ...]] = []
    window = map_window(fd, 6, lambda *call: later.append(call))
    os.close(fd)
    del window
    gc.collect()
    assert mappings() == 1
    for act, *args in later:
        act(*args)
    assert mappings() == 0


def test_writes_to_a_private_mapping_do_not_reach_the_memfd(memfd: int) -> None:
    os.write(memfd, b"abcdef")
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    map_window(memfd, 6).cast("B")[0] = ord("X")
    assert os.pread(memfd, 6, 0) == b"abcdef"


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_an_object_that_can_still_change_its_size_is_refused(memfd: int, seals: int) -> None:
    os.ftruncate(memfd, 4096)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ProtocolError, match="not sealed"):
        map_window(memfd, 4096)


def test_an_object_that_is_smaller_than_announced_is_refused(memfd: int) -> None:
    os.ftruncate(memfd, 100)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(ProtocolError, match="has 100 bytes, 101 were announced"):
        map_window(memfd, 101)


def test_a_descriptor_that_is_no_memory_is_refused() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(ProtocolError, match="cannot be sealed"):
            map_window(read, 1)
    finally:
        os.close(read)
        os.close(write)
