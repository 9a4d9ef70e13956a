"""The paths at which the daemon's socket may be, and the error when no daemon answers there."""

from __future__ import annotations

import errno
import getpass
import grp
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from djinn_client.errors import ConnectionLost

ENVIRONMENT = "DJINND_ADDRESS"
TOKEN_VARIABLE = "DJINND_TOKEN"
SYSTEM_SOCKET = "/run/djinnd/djinnd.sock"
_START = "start it with `djinnd`"
_GIVE_SOCKET = "give the path of djinnd's socket"
PATH_LIMIT = 107  # bytes: sun_path of Linux's sockaddr_un without the closing zero


def candidates(address: str | None = None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The socket paths to try: only the given one, else only $DJINND_ADDRESS, else the system's and then the user's."""
    if given := address or environ.get(ENVIRONMENT):
        return (given,)
    runtime = environ.get("XDG_RUNTIME_DIR")
    return (SYSTEM_SOCKET, f"{runtime}/djinnd/djinnd.sock") if runtime else (SYSTEM_SOCKET,)


def without_token(address: str) -> str:
    """The address for people to read: a URL may have a token in it."""
    return re.sub(r"//[^@/]*@", "//", address)


def may_be_remote(address: str | None) -> bool:
    """False for the path of a socket, and without an address if the user has named no hosts."""
    if address is None:
        return hosts_file().is_file()
    return "://" in address or "/" not in address


def hosts_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file in which a user names daemons of other machines: see transport/remote/hosts.py."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "djinn" / "client.toml"


def unreachable(failures: Sequence[tuple[str, OSError]]) -> ConnectionLost:
    """The error when no path has worked: it tells what is at each path, and then a remedy."""
    found = [finding(path, error) for path, error in failures]
    accounts = "; ".join(account for account, _ in found)
    remedy = next((remedy for _, remedy in found if remedy), "")
    message = f"{accounts}: {remedy}" if remedy else accounts
    return ConnectionLost(message, paths=[path for path, _ in failures], finding=accounts, remedy=remedy)


def finding(path: str, error: OSError) -> tuple[str, str]:
    """The state of the daemon at `path`, as the error of connecting there tells it, and a remedy or ""."""
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return f"no daemon at {path}", _START
        case errno.ECONNREFUSED if not _may_be_socket(path):
            return f"{path} is no socket", _GIVE_SOCKET
        case errno.ECONNREFUSED:
            return f"no daemon listens at {path} (the file is left from one that is gone)", _START
        case errno.EACCES | errno.EPERM:
            return f"no permission to use {path}", _membership(path) if _may_be_socket(path) else _GIVE_SOCKET
        case errno.ENAMETOOLONG:
            size = len(os.fsencode(path))
            told = f"the socket path {path} has {size} bytes, the system's limit is {PATH_LIMIT}"
            return told, "choose a shorter one with `djinnd --socket`"
        case _:
            return f"cannot connect to {path} ({error.strerror or error})", ""


def _may_be_socket(path: str) -> bool:
    """True if the path is a socket, or cannot be examined."""
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
