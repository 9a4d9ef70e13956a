"""The daemon replaces itself by its own command: the same process to systemd and to whoever waits for it.

Its listening socket goes with it, the way systemd hands sockets over (sd_listen_fds(3)): descriptors from 3 on, and
LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES in the environment. Clients that connect meanwhile wait in its queue.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import MutableMapping
from typing import NamedTuple, NoReturn

FIRST_FD = 3  # SD_LISTEN_FDS_START


class Inherited(NamedTuple):
    name: str  # "" where the giver has not said
    fd: int


def inherited(environ: MutableMapping[str, str]) -> list[Inherited]:
    """What this process was given. The variables are then removed and the descriptors closed on exec: children have no
    part in it."""
    is_ours = environ.get("LISTEN_PID") == str(os.getpid())
    if not is_ours:
        return []
    count = int(environ.get("LISTEN_FDS", "0"))
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(variable, None)
    found = [Inherited(name, FIRST_FD + i) for i, name in enumerate((names + [""] * count)[:count])]
    for _, fd in found:
        os.set_inheritable(fd, False)
    return found


def succeed(handed_over: list[Inherited]) -> NoReturn:
    """Starts the successor in the place of this process; every other descriptor but the standard ones is closed on
    exec. Raises OSError where the interpreter is gone."""
    free = FIRST_FD + len(handed_over)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for _, fd in handed_over]  # out of each other's way
    for number, fd in enumerate(copies, FIRST_FD):
        os.dup2(fd, number)
    names = ":".join(name for name, _ in handed_over)
    listen = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(copies)), "LISTEN_FDNAMES": names}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | listen)
