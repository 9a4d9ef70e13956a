"""How many of the machine's cores this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")  # in a container, the group's own folder


def usable_cores() -> int:
    """The cores of the process's affinity, or as many as the control group's quota of time is worth, if these are
    fewer. More threads than that would be stopped in the middle of their work."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota_v2(_GROUPS / "cpu.max") or _quota_v1(_GROUPS / "cpu")
    return max(min(cores, int(quota or cores)), 1)


def _quota_v2(file: Path) -> float:
    """Cores; 0: no quota."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, file.read_text().split())
        return quota / period
    return 0.0


def _quota_v1(folder: Path) -> float:
    with suppress(OSError, ValueError):
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return max(quota, 0) / period  # -1: none
    return 0.0
