"""Gives the process a root folder of its own, with only the files that it may read (mount_namespaces(7)).

Landlock prevents opening a file, but not stat(2): the size of a journal would reveal the activity of other users. In a
root folder of its own the process cannot see their files at all. This needs the right to mount, which root has, and
which every user has in a user namespace if the machine permits those.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from djinnd.confinement.libc import checked, libc

_CLONE_NEWNS, _CLONE_NEWUSER = 0x2_0000, 0x1000_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_PLACE = "/tmp"  # mount point of the new root: every machine has it, and this process has no file open beneath it


def enter(readable: Sequence[str]) -> bool:
    """Changes the root to a folder with only these files and folders. Missing paths are left out; open files stay open.

    Returns False if the machine does not permit it; then the process sees no change. The process must have one thread.
    In a user namespace it keeps capabilities, which the caller drops.
    """
    try:
        _unshare()
        sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _apart(readable)}
    except OSError:
        return False
    try:
        _mount(b"none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount(b"tmpfs", _PLACE, b"tmpfs", _MS_NOSUID_NODEV_NOEXEC, b"mode=755,size=1m")
        for link in filter(os.path.islink, readable):
            with suppress(FileExistsError):
                Path(_PLACE + link).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(os.readlink(link), _PLACE + link)
        for path, source in sources.items():
            _bind(path, source)
        os.chroot(_PLACE)
        os.chdir("/")
    except OSError:
        return False
    finally:
        for source in sources.values():
            os.close(source)
    return True


def _unshare() -> None:
    if os.geteuid() == 0:
        return _unshare_into(_CLONE_NEWNS)
    user, group = os.geteuid(), os.getegid()
    _unshare_into(_CLONE_NEWUSER | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _apart(readable: Iterable[str]) -> list[str]:
    """The paths that exist, are not links, and are not beneath another of them."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in readable}):
        is_new = not any(path.startswith(f"{above}/") for above in found)
        if is_new and os.access(path, os.R_OK) and not os.path.islink(path):
            found.append(path)
    return found


def _bind(path: str, source: int) -> None:
    target = Path(_PLACE + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{source}"):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(f"/proc/self/fd/{source}".encode(), str(target), None, _MS_BIND | _MS_REC)


def _unshare_into(kinds: int) -> None:
    checked(libc.unshare(kinds), "unshare")


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    checked(libc.mount(source, target.encode(), kind, ctypes.c_ulong(flags), options), f"mount {target}")
