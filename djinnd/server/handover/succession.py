"""The daemon replaces itself by executing its own command: it stays the same process for systemd and for a shell.

Its listening socket goes along, in the way of systemd (sd_listen_fds(3)): descriptors from 3 on, and LISTEN_PID,
LISTEN_FDS and LISTEN_FDNAMES in the environment. Clients that connect meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import MutableMapping
from typing import NamedTuple, NoReturn

FIRST_FD = 3  # SD_LISTEN_FDS_START


class Inherited(NamedTuple):
    """A descriptor that this process was given."""

    name: str  # empty if the giver has set none
    fd: int


def inherited(environ: MutableMapping[str, str]) -> list[Inherited]:
    """The descriptors that this process was given. Removes the variables and marks the descriptors close-on-exec, so
    that child processes get neither."""
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
    """Executes the successor in this process. Of the other descriptors only the standard ones stay open. Raises OSError
    if the interpreter is gone."""
    free = FIRST_FD + len(handed_over)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for _, fd in handed_over]  # above their new numbers
    for number, fd in enumerate(copies, FIRST_FD):
        os.dup2(fd, number)
    names = ":".join(name for name, _ in handed_over)
    listen = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(copies)), "LISTEN_FDNAMES": names}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | listen)
