"""Closing the door behind what was imported: from then on this process can compute, and talk over its one socket.

    whose it is    the tenant's user, without capabilities, where the daemon is root's (nobody's for a principal that
                   is no Unix user); else the daemon's
    names          none but those of what it may read, where the machine permits that: own_root.py
    files          read what Python and the system's libraries are made of: landlock.py
    calls          seccomp.py
    memory         what it has then and so many bytes more, of address space: that counts what is shared, too
    and none of    files of any length, core dumps, processes, privileges by execve; little of descriptors

The order follows from what each takes away; all of it holds until the process ends. The process has one thread: both
Landlock and seccomp are about threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import resource
import signal
import site
import sys
import sysconfig
from pathlib import Path

from djinn_client.principals import is_unix_user
from djinnd.confinement import landlock, own_root, seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES_V3 = 0x2008_0522
DESCRIPTORS = 64
_NOBODY = 65534  # the kernel's default overflow uid, which owns nothing
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/urandom")


def missing() -> str:
    """What this machine lacks to confine a process; "": nothing."""
    threads = len(os.listdir("/proc/self/task"))
    return landlock.missing() or seccomp.missing() or (f"one thread, but has {threads}" if threads > 1 else "")


def tie_to(parent: int) -> None:
    """The kernel kills this process when its parent dies. A change of user unties it. Raises SystemExit where the
    parent is gone already."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the server is gone already")


def close(user: int, parent: int, memory: int, descriptors: int = DESCRIPTORS) -> None:
    """`user`: the tenant's principal; `memory`: bytes beyond what the process has. Nothing must be `missing`. Raises
    OSError."""
    paths = _readable()
    uid = user if is_unix_user(user) else _NOBODY
    room = _address_space() + memory
    nowhere = os.open(os.devnull, os.O_RDWR)
    own_root.enter(paths)
    if os.geteuid() == 0:
        _become(uid)
    _drop_capabilities()
    tie_to(parent)
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    landlock.restrict(paths)
    _limit(room, descriptors)
    for fd in range(3):  # what a function prints is not for the daemon's log
        os.dup2(nowhere, fd)
    os.close(nowhere)
    seccomp.install()


def limit(memory: int, descriptors: int = DESCRIPTORS) -> None:
    """Only what needs nothing of the kernel that may be `missing`: the limits of memory, files and processes."""
    _limit(_address_space() + memory, descriptors)


def _address_space() -> int:
    """Bytes that the process has."""
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
    """For good."""
    try:
        group = pwd.getpwuid(user).pw_gid
    except KeyError:  # a user that this machine does not know
        group = user
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    if _libc().capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _readable() -> list[str]:
    """Where what is imported late lies: Python, its packages, ours, the libraries of the system. Not all of sys.path,
    which may have any folder."""
    paths = sysconfig.get_paths()
    packages = [*site.getsitepackages(), paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    prefixes = [sys.prefix, sys.base_prefix] if sys.base_prefix not in ("/", "/usr") else []
    specs = [importlib.util.find_spec(name) for name in ("djinnd", "djinn_client")]
    ours = [str(Path(place).resolve()) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return [*_SYSTEM, *packages, *prefixes, *ours]
