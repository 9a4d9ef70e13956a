"""The paths at which the daemon's socket may be, and the error when no daemon answers there."""

from __future__ import annotations

import errno
import getpass
import grp
import os
import stat
from collections.abc import Mapping, Sequence

from djinn_client.errors import ConnectionLost

ENVIRONMENT = "DJINND_ADDRESS"
SYSTEM_SOCKET = "/run/djinnd/djinnd.sock"
PATH_LIMIT = 107  # bytes: sun_path of Linux's sockaddr_un without the closing zero


def candidates(address: str | None = None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The socket paths to try: only the given one, else only $DJINND_ADDRESS, else the system's and then the user's."""
    if given := address or environ.get(ENVIRONMENT):
        return (given,)
    runtime = environ.get("XDG_RUNTIME_DIR")
    return (SYSTEM_SOCKET, f"{runtime}/djinnd/djinnd.sock") if runtime else (SYSTEM_SOCKET,)


def unreachable(failures: Sequence[tuple[str, OSError]]) -> ConnectionLost:
    """The error when no path has worked: it tells what is at each path, and then a remedy."""
    accounts = "; ".join(account(path, error) for path, error in failures)
    remedies = (_remedy(path, error) for path, error in failures)
    remedy = next(filter(None, remedies), "")
    message = f"{accounts}: {remedy}" if remedy else accounts
    return ConnectionLost(message, paths=[path for path, _ in failures], finding=accounts, remedy=remedy)


def account(path: str, error: OSError) -> str:
    """The state of the daemon at `path`, as the error of connecting there tells it."""
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return f"no daemon at {path}"
        case errno.ECONNREFUSED if not _may_be_socket(path):
            return f"{path} is no socket"
        case errno.ECONNREFUSED:
            return f"no daemon listens at {path} (the file is left from one that is gone)"
        case errno.EACCES | errno.EPERM:
            return f"no permission to use {path}"
        case errno.ENAMETOOLONG:
            size = len(os.fsencode(path))
            return f"the socket path {path} has {size} bytes, the system's limit is {PATH_LIMIT}"
        case _:
            return f"cannot connect to {path} ({error.strerror or error})"


def _remedy(path: str, error: OSError) -> str:
    match error.errno:
        case errno.EACCES | errno.EPERM | errno.ECONNREFUSED if not _may_be_socket(path):
            return "give the path of djinnd's socket"
        case errno.EACCES | errno.EPERM:
            return _membership(path)
        case errno.ENOENT | errno.ENOTDIR | errno.ECONNREFUSED:
            return "start it with `djinnd`"
        case errno.ENAMETOOLONG:
            return "choose a shorter one with `djinnd --socket`"
        case _:
            return ""


def _may_be_socket(path: str) -> bool:
    """Whether it is one, or cannot be seen."""
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True


def _membership(path: str) -> str:
    for place in (path, os.path.dirname(path)):
        try:
            number = os.stat(place).st_gid
            group = grp.getgrgid(number).gr_name
        except (OSError, KeyError):
            continue
        if number == 0:  # members of root's group may do far more than use models
            break
        user = getpass.getuser()
        return f"it belongs to group {group}; `sudo usermod -aG {group} {user}`, then log in again"
    return "ask its administrator for membership of its group"
