"""Limits of the machine's memory: what may be locked, and what POSIX shared memory holds."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from djinnctl.doctor.result import Result, fail, ok, warn
from djinnctl.units import size

SHM = "/dev/shm"
LEAST_SHM = 1 << 30  # bytes: less holds no model that is worth a daemon


def check_memlock() -> Iterator[Result]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judge_memlock(soft, hard)


def check_shm() -> Iterator[Result]:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        stat = os.statvfs(SHM)
    except OSError as error:
        yield fail(SHM, f"cannot be read: {error.strerror}", f"mount a tmpfs there: mount -t tmpfs tmpfs {SHM}")
        return
    yield judge_shm(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, physical)


def judge_memlock(soft: int, hard: int) -> Result:
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    finding = f"{size(soft)} may be locked; pinned memory may count against that"
    if hard == resource.RLIM_INFINITY:
        return warn("memlock", finding, "`ulimit -l unlimited` before djinnd, or LimitMEMLOCK=infinity in its unit")
    return warn(
        "memlock",
        finding,
        "LimitMEMLOCK=infinity in djinnd's unit, or `memlock unlimited` in /etc/security/limits.conf",
    )


def judge_shm(total: int, free: int, physical: int) -> Result:
    """The arena holds every loaded model's weights and the host pages, all of it in `/dev/shm`."""
    finding = f"{size(free)} free of {size(total)}"
    larger = f"mount -o remount,size={max(physical * 3 // 4 >> 20, 1)}m {SHM}; in a container, --shm-size"
    if total < LEAST_SHM:
        return fail(SHM, f"{finding}: too small for weights", larger)
    if free < LEAST_SHM:
        return fail(SHM, finding, f"see what fills it: ls -l {SHM}; `djinnctl doctor --fix` removes what is stale")
    if total < physical // 4:
        return warn(SHM, f"{finding}, and {size(physical)} of memory: larger models would not fit", larger)
    return ok(SHM, finding)
