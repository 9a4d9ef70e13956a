"""How much memory this process can still take. This is the only place that reads the kernel's limits.

A process that takes more than its control group allows is killed, and shared memory counts as the group's. So the
answer is the tightest of everything that bounds the process: the machine, each control group from the process's own up
to the root, in both versions of control groups, and the process's own resource limits.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_V1 = "memory"  # the folder of the version-1 memory controller below _CGROUPS
_V2 = (".", "unified")  # where version 2 is mounted: alone, or beside version 1


class Bound(NamedTuple):
    """`left`: bytes that can be taken before the bound is reached. Caches of files give way and count as left."""

    left: int
    name: str


def available() -> int | None:
    """Bytes that can be taken without swapping; None where the kernel does not say."""
    bound = tightest()
    return None if bound is None else bound.left


def tightest() -> Bound | None:
    bounds = [*_of_host(), *_of_groups(), *_of_process()]
    return min(bounds, default=None)


def anonymous_bytes() -> int:
    """Private memory that this process has touched; 0 where the kernel does not say."""
    return _status().get("RssAnon", 0)


def _of_host() -> Iterator[Bound]:
    with suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield Bound(int(line.split()[1]) * 1024, "the machine")


def _of_groups() -> Iterator[Bound]:
    v1, v2 = _own_groups()
    for folder in _upwards(_CGROUPS / _V1, v1):
        yield from _of_group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for mount in _V2:
        for folder in _upwards(_CGROUPS / mount, v2):
            for limit in ("memory.max", "memory.high"):
                yield from _of_group(folder, limit, "memory.current", "")


def _own_groups() -> tuple[str, str]:
    """Paths of this process's memory group in version 1 and of its group in version 2; "" is the root."""
    v1 = v2 = ""
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                v2 = path
            elif "memory" in controllers.split(","):
                v1 = path
    return v1, v2


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder and its parents up to the mount. In a container the kernel may name a path that is not mounted
    there; the mount itself then is the container's group."""
    own = mount / group.lstrip("/")
    yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _of_group(folder: Path, limit_file: str, used_file: str, prefix: str) -> Iterator[Bound]:
    """`prefix` begins the names in the group's memory.stat."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        limit = int((folder / limit_file).read_text())
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        caches = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
        yield Bound(max(limit - used + caches, 0), f"the control group {folder}")


def _of_process() -> Iterator[Bound]:
    used = _status()
    for limit, field, name in (
        (resource.RLIMIT_AS, "VmSize", "RLIMIT_AS"),
        (resource.RLIMIT_DATA, "VmData", "RLIMIT_DATA"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield Bound(max(soft - used.get(field, 0), 0), name)


def _status() -> dict[str, int]:
    """The fields of /proc/self/status that are sizes, in bytes."""
    with suppress(OSError):
        lines = [line.split() for line in (_PROC / "self" / "status").read_text().splitlines()]
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return {}
