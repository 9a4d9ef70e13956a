"""A root folder of the process's own, which has what it may read and nothing else (mount_namespaces(7)).

Landlock keeps files from being opened, and not from being looked at: stat(2) tells the size of a journal, and so what
others do. In a root folder of its own a process finds no name of anybody else's. That takes the right to mount: root
has it, and anybody has it in a user namespace, where the machine permits these.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x2_0000, 0x1000_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_PLACE = "/tmp"  # which every machine has, and which nothing of this process is open beneath


def enter(readable: Sequence[str]) -> bool:
    """Makes a root folder of these files and folders alone; missing paths are left out. Open files stay open.
    False where the machine does not permit it, and then nothing has changed that the process could notice.

    The process has one thread. It keeps capabilities in a namespace of its own, which the caller drops."""
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
    """Those that exist, are no links, and are not beneath another one."""
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
    _checked(_libc().unshare(kinds), "unshare")


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _checked(_libc().mount(source, target.encode(), kind, ctypes.c_ulong(flags), options), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
