"""Landlock: lets a process open files only for reading, and only beneath a few folders (landlock(7))."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from djinnd.confinement.libc import checked, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Number of rights that each version of the interface can take away: 13, then one more each for REFER, TRUNCATE,
# IOCTL_DEV.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST_RIGHTS = 16


def missing() -> str:
    """The feature that this kernel lacks; "" if none."""
    return "" if _version() > 0 else "Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK, and landlock among its lsm=)"


def restrict(readable: Iterable[str]) -> None:
    """Restricts this thread and its children: they may open only these files, and files beneath these folders, for
    reading. Missing paths are ignored, and open files stay open. `no_new_privs` must be set. Raises OSError."""
    handled = (1 << _RIGHTS.get(_version(), _NEWEST_RIGHTS)) - 1
    attributes = struct.pack("=Q", handled)  # struct landlock_ruleset_attr of the first version
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in readable:
            _allow(ruleset, path)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def _version() -> int:
    """Version of the kernel's Landlock interface; 0 if it has none."""
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return 0


def _call(number: int, *arguments: object) -> int:
    return checked(libc.syscall(ctypes.c_long(number), *arguments), "Landlock")
