"""What this host has free for the pages of sessions. In a container: what the container has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from djinnd.engine.memory import HostRoom

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2; inside a container, its own
_SHM = "/dev/shm"


def host_room(disk_folder: str) -> HostRoom:
    """`disk_folder` "": there is no disk for pages."""
    free = [_available(_MEMINFO.read_text()), *_left_by_limit(_CGROUP)]
    return HostRoom(min(free), _free_in(_SHM), _free_in(disk_folder) if disk_folder else 0)


def _available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _left_by_limit(cgroup: Path) -> list[int]:
    """Bytes up to the group's limit, if it has one. Its caches of files give way; shared memory counts as used."""
    with suppress(OSError, ValueError):  # no such files, or "max"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return [max(limit - used + int(stat.get("inactive_file", 0)), 0)]
    return []


def _free_in(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
