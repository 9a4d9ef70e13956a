from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinnd.engine.memory import host_room as module
from djinnd.engine.memory.host_room import host_room


@pytest.mark.parametrize(("left", "promised", "memory"), [(100, 0, 100), (100, 30, 70), (100, 130, 0), (None, 0, 0)])
def test_free_memory_is_available_minus_promised(
    monkeypatch: pytest.MonkeyPatch, left: int | None, promised: int, memory: int
) -> None:
    monkeypatch.setattr(module, "available", lambda: left)
    assert host_room("", promised).memory == memory


def test_free_shared_memory_and_disk(tmp_path: Path) -> None:
    room, free = host_room(str(tmp_path)), os.statvfs("/dev/shm")
    assert 0 < room.shared <= free.f_blocks * free.f_frsize
    free = os.statvfs(tmp_path)
    assert 0 < room.disk <= free.f_blocks * free.f_frsize
    assert host_room("").disk == 0
