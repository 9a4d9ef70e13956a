"""The CPU time of another process."""

from __future__ import annotations

import time


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process, from its kernel clock: clock_getcpuclockid(3), which Python lacks. None if the process has
    ended, or `pid` is 0."""
    try:
        return time.clock_gettime((~pid << 3) | 2) if pid else None
    except OSError:
        return None
