"""Shared memory that a dead daemon left behind.

Every object of djinnd's arena begins with this header (little-endian, texts filled up with zeros); `ticks` is when the
owner's process started (field 22 of /proc/PID/stat), so that another process that has got the same number is not taken
for it. The fields after the ticks are those of version 4. An object is complete if `state` is 2:

    byte 0            8          16           24      28    32      40         48          112     128     2048
         ┌────────────┬──────────┬────────────┬───────┬─────┬───────┬──────────┬───────────┬───────┬───────┬───────────┐
         │ "DJARENA1" │ pid: u64 │ ticks: u64 │version│state│payload│generation│fingerprint│ holds │ model │ state dir │
         └────────────┴──────────┴────────────┴───────┴─────┴───────┴──────────┴───────────┴───────┴───────┴───────────┘

The owner also holds a lock (flock) on the object as long as it lives, which is true across containers too. An object is
stale when neither the lock nor the process is there. A stale object is adoptable if it is complete and holds the
weights of a model or pages of its sessions: the next daemon with its state directory takes it over."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from djinnctl.doctor.result import Result, ok, warn
from djinnctl.units import size

MAGIC = b"DJARENA1"
OWNER = struct.Struct("<8sQQ")
CONTENT = struct.Struct("<8xQQIIQQ64x16s1920s1984s64x")
VERSION, WHOLE = 4, (2, 3)  # states: complete, and complete of a model that slept
SHM = Path("/dev/shm")
PREFIX = "djinnd-"
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


class Object(NamedTuple):
    name: str
    nbytes: int
    state: Literal["live", "adoptable", "stale", "foreign", "unreadable", "odd"]
    pid: int = 0
    holds: str = ""  # of an adoptable one "weights" or "pages"; of an odd one its kind
    model: str = ""
    state_dir: str = ""


def check(root: Path = SHM, *, fix: bool = False) -> Iterator[Result]:
    paths = sorted(root.glob(f"{PREFIX}*"))
    for path in paths:
        with _examined(path) as found:
            if fix and found.state in ("stale", "adoptable"):
                path.unlink()
                yield ok("arena", f"removed {found.name} ({size(found.nbytes)}) of process {found.pid}, which is gone")
            else:
                yield judge(found)
    if not paths:
        yield ok("arena", f"nothing of djinnd's in {root}")


def judge(found: Object) -> Result:
    match found.state:
        case "live":
            return ok("arena", f"{found.name} ({size(found.nbytes)}) belongs to process {found.pid}, which runs")
        case "adoptable":
            return warn(
                "arena",
                f"{found.name} ({size(found.nbytes)}) has the {found.holds} of {found.model} from process {found.pid}, "
                "which is gone",
                f"the next djinnd with state directory {found.state_dir} takes it over; if none will come, "
                "`djinnctl doctor --fix` removes it",
            )
        case "stale":
            return warn(
                "arena",
                f"{found.name} ({size(found.nbytes)}) is left from process {found.pid}, which is gone",
                "the next start of djinnd deals with it, or `djinnctl doctor --fix` removes it",
            )
        case "unreadable":
            return warn("arena", f"{found.name} is not yours to read", "run doctor as the user of that djinnd")
        case "odd":
            return warn("arena", f"{found.name} is {found.holds}, which no djinnd has made", f"rm {SHM / found.name}")
        case "foreign":
            return warn(
                "arena",
                f"{found.name} ({size(found.nbytes)}) has no header of djinnd's",
                f"unless a djinnd is starting just now: rm {SHM / found.name}",
            )


def started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextmanager
def _examined(path: Path) -> Iterator[Object]:
    """A stale object is locked meanwhile, so that no daemon adopts an object that is about to be removed."""
    try:
        fd = _open(path)
    except OSError:
        yield Object(path.name, 0, "unreadable")
        return
    if isinstance(fd, str):
        yield Object(path.name, 0, "odd", holds=fd)
        return
    try:
        yield _inspect(path.name, fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int | str:
    """A descriptor for reading, or the kind of a file that is no regular one. Any user may make files by such names, so
    the kind is found out first: opening a pipe or a leased file would block. Raises OSError."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            return _KINDS.get(stat.S_IFMT(mode), "a device")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


def _inspect(name: str, fd: int) -> Object:
    nbytes, header = os.fstat(fd).st_size, os.pread(fd, CONTENT.size, 0)
    if len(header) < OWNER.size or not header.startswith(MAGIC):
        return Object(name, nbytes, "foreign")  # and not locked: a daemon that has just made it is about to do that
    _, pid, ticks = OWNER.unpack_from(header)
    if _is_locked(fd) or started(pid) == ticks:
        return Object(name, nbytes, "live", pid)
    if len(header) == CONTENT.size:
        _, _, version, state, payload, _, *texts = CONTENT.unpack(header)
        if (version, CONTENT.size + payload) == (VERSION, nbytes) and state in WHOLE:
            return Object(name, nbytes, "adoptable", pid, *map(_text, texts))
    return Object(name, nbytes, "stale", pid)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _is_locked(fd: int) -> bool:
    """Whether another process has it locked. If not, this descriptor locks it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
