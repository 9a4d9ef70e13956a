"""Sandbox: confines this process after its imports. Afterwards it can only compute and use its one socket.

    user           the tenant's user if the daemon runs as root (the overflow user for a principal that is not a Unix
                   user), otherwise the daemon's; no capabilities;
    file names     only files that it may read are visible, if the machine permits that (own_root.py);
    files          it may read Python, its packages and the system's libraries (landlock.py);
    system calls   see seccomp.py;
    memory         its current address space and a number of bytes more; shared memory counts, too;
    not at all     writing files, core dumps, new processes, privileges by execve; descriptors are few.

The order of the steps matters, because each takes away rights that an earlier one needs. All of it holds until the
process ends. The process must have one thread, because Landlock and seccomp apply to threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import resource
import site
import sys
import sysconfig
from pathlib import Path

from djinnd.config.principals import is_unix_user
from djinnd.confinement import landlock, own_root, seccomp
from djinnd.confinement.libc import checked, libc
from djinnd.lifeline import tie_to

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_V3 = 0x2008_0522
DESCRIPTORS = 64
_NOBODY = 65534  # the kernel's default overflow uid; it owns no files
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/urandom")


def missing() -> str:
    """The feature that this machine lacks to confine a process; "" if none."""
    threads = len(os.listdir("/proc/self/task"))
    return landlock.missing() or seccomp.missing() or (f"one thread, but has {threads}" if threads > 1 else "")


def close(user: int, parent: int, memory: int, descriptors: int = DESCRIPTORS) -> None:
    """Confines this process for good. `missing` must have returned "". Raises OSError.

    user: the tenant's principal.
    memory: bytes that it may take beyond its current address space.
    """
    paths = _readable()
    uid = user if is_unix_user(user) else _NOBODY
    room = _address_space() + memory
    nowhere = os.open(os.devnull, os.O_RDWR)
    own_root.enter(paths)
    if os.geteuid() == 0:
        _become(uid)
    _drop_capabilities()
    tie_to(parent)
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs cannot be set")
    landlock.restrict(paths)
    _limit(room, descriptors)
    for fd in range(3):  # output of a function does not belong in the daemon's log
        os.dup2(nowhere, fd)
    os.close(nowhere)
    seccomp.install()


def limit(memory: int, descriptors: int = DESCRIPTORS) -> None:
    """Sets only the limits of memory, files and processes, which every kernel has. Used if a feature is `missing`."""
    _limit(_address_space() + memory, descriptors)


def _address_space() -> int:
    """Bytes of address space that the process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _limit(room: int, descriptors: int) -> None:
    for limit, most in (
        (resource.RLIMIT_AS, room),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, descriptors),
    ):
        resource.setrlimit(limit, (most, most))


def _become(user: int) -> None:
    """Changes to the user and its group, for good."""
    try:
        group = pwd.getpwuid(user).pw_gid
    except KeyError:  # a user that this machine does not know
        group = user
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    checked(libc.capset(header, none), "capabilities cannot be given up")


def _readable() -> list[str]:
    """Folders from which modules may be imported later: Python, its packages, djinnd, the system's libraries. sys.path
    is not used, because it may contain any folder."""
    paths = sysconfig.get_paths()
    packages = [*site.getsitepackages(), paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    prefixes = [sys.prefix, sys.base_prefix] if sys.base_prefix not in ("/", "/usr") else []
    specs = [importlib.util.find_spec(name) for name in ("djinnd", "djinn_client")]
    ours = [str(Path(place).resolve()) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return [*_SYSTEM, *packages, *prefixes, *ours]
