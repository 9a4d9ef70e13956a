"""Limits of the machine's memory, of locked memory and of POSIX shared memory."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from djinn_client.transport.host_memory import Bound, tightest
from djinnctl.doctor.result import Result, fail, ok, warn
from djinnctl.units import size

SHM = "/dev/shm"
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE_PAGES = f"mount -o remount,huge=within_size {SHM}, and the same in /etc/fstab; takes effect for models loaded then"
LEAST_MEMORY = 2 << 30  # bytes: server and engine take 1 GiB without any model
LEAST_SHM = 1 << 30  # bytes: less holds no model that is worth a daemon


def check_memory() -> Iterator[Result]:
    """The memory that this process may take. A service has a control group of its own."""
    bound = tightest()
    if bound is not None:
        yield judge_memory(bound)


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
    if SHMEM_ENABLED.exists():  # else the kernel has no huge pages for shared memory
        yield judge_huge_pages(Path("/proc/self/mounts").read_text(), SHMEM_ENABLED.read_text())


def judge_memory(bound: Bound) -> Result:
    finding = f"{size(bound.left)} of host memory available, bounded by {bound.name}"
    if bound.left >= LEAST_MEMORY:
        return ok("memory", finding)
    return warn(
        "memory", finding, "raise that limit (MemoryMax= of the unit, --memory of the container), or end others"
    )


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


def judge_huge_pages(mounts: str, enabled: str) -> Result:
    """`mounts`: as in /proc/self/mounts; the last mount at a place hides earlier ones. `enabled`: the kernel's
    own word, of which "deny" and "force" hold whatever the mount says."""
    options = [line.split()[3].split(",") for line in mounts.splitlines() if line.split()[1] == SHM]
    of_mount = next((option[5:] for option in (options or [[]])[-1] if option.startswith("huge=")), "never")
    of_kernel = re.search(r"\[(deny|force)\]", enabled)
    huge = of_kernel[1] if of_kernel else of_mount
    if huge in ("always", "within_size", "force"):
        return ok(SHM, f"in huge pages ({huge})")
    if huge == "deny":
        return warn(SHM, "the kernel denies it huge pages", f"echo never > {SHMEM_ENABLED}, and {HUGE_PAGES}")
    return warn(SHM, "in pages of 4 KiB: large models and many sessions load, pin and restart slower", HUGE_PAGES)
