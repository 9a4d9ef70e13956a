from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinnd.engine import host_room as module
from djinnd.engine.host_room import host_room

MEMINFO = "MemTotal:       100 kB\nMemFree:          10 kB\nMemAvailable:      64 kB\n"
GROUP = {"memory.max": "40960\n", "memory.current": "20480\n", "memory.stat": "anon 4096\ninactive_file 8192\n"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control group, which is empty yet."""
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(MEMINFO)
    group.mkdir()
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(module, "_CGROUP", group)
    return group


def test_memory_is_what_the_kernel_says_is_available(host: Path) -> None:
    assert host_room("").memory == 64 << 10


@pytest.mark.parametrize(
    ("changes", "memory"),
    [
        ({}, 20480 + 8192),
        ({"memory.max": "max\n"}, 64 << 10),
        ({"memory.max": "1000000\n"}, 64 << 10),
        ({"memory.current": "999999\n"}, 0),
    ],
)
def test_a_container_has_what_its_limit_leaves(host: Path, changes: dict[str, str], memory: int) -> None:
    for name, text in (GROUP | changes).items():
        (host / name).write_text(text)
    assert host_room("").memory == memory


def test_shared_memory_and_disk(tmp_path: Path) -> None:
    room, free = host_room(str(tmp_path)), os.statvfs("/dev/shm")
    assert 0 < room.shared <= free.f_blocks * free.f_frsize
    free = os.statvfs(tmp_path)
    assert 0 < room.disk <= free.f_blocks * free.f_frsize
    assert host_room("").disk == 0
