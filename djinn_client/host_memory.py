"""What this host has left for memory that is about to be taken. In a container: what the container has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")  # of version 2


def available() -> int | None:
    """Bytes that can be had without swapping; None where the kernel does not say. Who takes more is killed, where
    overcommitting is on: asking for it is no error then."""
    return min([*_left_by_host(), *_left_by_groups()], default=None)


def _left_by_host() -> Iterator[int]:
    with suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _left_by_groups() -> Iterator[int]:
    """Up to the limits of this process's control group and of those that it is in."""
    group = _own_group()
    for folder in (group, *group.parents):
        if folder.is_relative_to(_CGROUPS):
            yield from _left_by_group(folder)


def _own_group() -> Path:
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return _CGROUPS / line[3:].lstrip("/")
    return _CGROUPS


def _left_by_group(folder: Path) -> Iterator[int]:
    """Its caches of files give way; shared memory counts as used."""
    with suppress(OSError, ValueError):  # no such files, or "max"
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        caches = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        yield max(limit - used + caches, 0)
